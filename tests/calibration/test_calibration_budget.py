"""A calibration that ends in time, and one whose steps take a known time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.calibration.design import (
    HELD_OUT,
    LEARNED,
    PRICED,
    QUICK_HELD_OUT,
    QUICK_LEARNED,
    Point,
    TimeBudget,
    possible,
)
from kvell.calibration.rig import TimedStep
from kvell.calibration.run import (
    FIT_SECONDS,
    Repeats,
    calibrate,
    calibrate_within,
    constant_share,
    errors,
    measure,
)
from kvell.clock import VirtualClock
from kvell.cost.fit import MeasuredStep, fit_operators
from kvell.cost.prices import ExecCosts, prices_of
from kvell.cost.work import Chunk, Work
from kvell.models.sources.progress import quiet
from tests.calibration.known import Known, KnownRunner, known
from tests.cost.oracles import SHAPE, decodes, oracle, prompt, unseen
from tests.depth import some


def repeats_within(here: Known, seconds: float) -> list[Repeats]:
    budget = TimeBudget(here.clock, here.clock.now_seconds() + seconds)
    rig = here.subject.rig(here.clock)
    return measure(rig, here.subject.can(PRICED), quiet, 3, budget)


@dataclass(frozen=True)
class Skipping:
    """A machine whose skipped steps take no time."""

    here: Known

    def step_seconds(self, work: Sequence[Work]) -> float:
        return 0.0 if self.here.subject.model.skips else self.here.machine.step_seconds(work)


@pytest.fixture
def here() -> Known:
    made = known("LlamaForCausalLM", computes=False)
    runner = made.subject.engine.runner
    assert isinstance(runner, KnownRunner)
    runner.machine = Skipping(made)
    return made


@pytest.mark.parametrize("seconds", [0.2, 0.5, 2.0])
def test_steps_end_within_the_budget(here: Known, seconds: float) -> None:
    began = here.clock.now_seconds()
    repeats = repeats_within(here, seconds)
    assert here.clock.now_seconds() - began <= seconds * 1.2
    assert repeats[0].point == PRICED[0]


def test_more_time_gives_more_points_and_rounds(here: Known) -> None:
    counts = [
        (len(repeats), sum(len(each.steps) for each in repeats))
        for repeats in (repeats_within(here, seconds) for seconds in (0.0, 0.3, 60.0))
    ]
    assert counts[0] == (1, 0)
    assert counts == sorted(counts)
    assert counts[2][0] == len(here.subject.can(PRICED))
    assert counts[2][1] > counts[1][1]


def test_the_first_round_counts_only_without_another(here: Known) -> None:
    [alone] = repeats_within(here, 0.0)
    assert alone.median().seconds > 0
    several = repeats_within(here, 60.0)[0]
    assert several.steps
    assert several.median().seconds <= max(step.seconds for step in several.steps)


def test_a_larger_point_is_expected_to_take_longer() -> None:
    clock = VirtualClock()
    budget = TimeBudget(clock, 10.0)
    assert budget.allows(Point(0, 0, 0, 1024))
    clock.advance(1.0)
    budget.note(Point(0, 0, 0, 64), 0.0)
    assert budget.allows(Point(0, 0, 0, 512))
    assert not budget.allows(Point(0, 0, 0, 1024))
    assert budget.allows(Point(1, 16))
    clock.advance(8.5)
    assert not budget.allows(Point(0, 0, 0, 64))


def test_a_short_calibration_is_near_the_machine(here: Known) -> None:
    made = calibrate_within(here.subject, here.clock, quiet, 60.0 + FIT_SECONDS)
    steps = [decodes(1, 300), decodes(4, 500), decodes(8, 300)]
    steps += [prompt(0, 64), prompt(0, 400), prompt(1024, 256), prompt(0, 2000)]
    for work in steps:
        assert made.step_seconds(work) == pytest.approx(here.machine.step_seconds(work), rel=0.25)


def priced(model: object) -> ExecCosts:
    rates = {"fetch_bytes_per_second": 1e9, "swap_bytes_per_second": 1e9}
    return prices_of(model, SHAPE, **rates)  # type: ignore[arg-type]


def work_of(point: Point) -> tuple[Chunk, ...]:
    decodes = [Chunk(point.context_tokens, 1, 1)] * point.decodes
    prompt = [Chunk(point.cached_tokens, point.new_tokens, 1)] if point.new_tokens else []
    return (*decodes, *prompt)


@some()
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=len(PRICED)))
def test_any_times_give_finite_prices(seconds: Sequence[float]) -> None:
    """Planners divide by some of them, so these are above 0."""
    timed = zip(PRICED, seconds, strict=False)
    steps = [MeasuredStep(work_of(point), each) for point, each in timed]
    prices = priced(fit_operators(SHAPE, steps))
    values = [*structs.astuple(prices)[:-1], *prices.natn_seconds]
    assert all(isfinite(value) and value >= 0 for value in values)
    assert min(prices.request_seconds, prices.fetch_token_seconds) > 0
    assert prices.exec_seconds(1, 0) > 0


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_known_steps(architecture: str) -> None:
    here = known(architecture, computes=False)
    made = calibrate(here.subject, here.clock, quiet, quick=True).calibration
    assert made.held_out.steps > 8
    assert max(made.held_out.prefill_error, made.held_out.decode_error) < 0.02
    assert made.noise < 0.01
    for work in unseen():
        assert made.step_seconds(work) == pytest.approx(here.machine.step_seconds(work), rel=0.1)
    assert made.model.name == architecture
    assert made.machine.device == "cpu"


def test_progress_runs_to_its_end() -> None:
    here, told = known("LlamaForCausalLM", computes=False), []
    calibrate(here.subject, here.clock, lambda what, part: told.append((what, part)), quick=True)
    assert told == sorted(told, key=lambda each: each[1])
    assert 0.9 < told[-1][1] <= 1.0


class TestDesign:
    def test_judges_were_not_learned_from(self) -> None:
        assert not set(LEARNED) & set(HELD_OUT)
        assert not set(QUICK_LEARNED) & set(QUICK_HELD_OUT)

    @pytest.mark.parametrize("points", [LEARNED, HELD_OUT, QUICK_LEARNED, QUICK_HELD_OUT])
    def test_every_kind_of_step(self, points: tuple[Point, ...]) -> None:
        assert {point.kind for point in points} == {"decode", "prefill", "mixed"}

    def test_only_what_fits(self) -> None:
        points = [Point(4, 100), Point(64, 100), Point(0, 0, 50, 90), Point(0, 0, 0, 200)]
        kept = possible(points, lambda n, tokens: n * tokens <= 400, 100, 64)
        assert kept == [Point(4, 100), Point(0, 0, 50, 90)]

    def test_a_small_pool_allows_less(self) -> None:
        here = known("LlamaForCausalLM", 1 << 20)
        assert 0 < len(here.subject.can(LEARNED)) < len(LEARNED)


class TestFigures:
    WORK = (Chunk(0, 4),)

    def repeats(self, *seconds: float, point: Point | None = None) -> Repeats:
        return Repeats(point or Point(1, 4), [TimedStep(self.WORK, each) for each in seconds])

    def test_half_of_the_repeats_is_below(self) -> None:
        assert self.repeats(1.0, 2.0, 3.0, 9.0, 50.0).median().seconds == 3.0

    def test_spread(self) -> None:
        assert self.repeats(1.0, 2.0, 3.0, 4.0, 5.0).spread == pytest.approx(2 / 3)

    def test_errors_by_kind(self) -> None:
        machine = oracle()
        true = machine.step_seconds(self.WORK)
        judged = [
            self.repeats(true * 2),
            self.repeats(true, point=Point(0, 0, 0, 8)),
        ]
        found = errors(machine, judged)
        assert found.decode_error == pytest.approx(0.5)
        assert found.prefill_error == pytest.approx(0.0, abs=1e-9)
        assert (found.mixed_error, found.steps) == (0.0, 2)

    @pytest.mark.parametrize(("rate", "share"), [(1e12, 0.9), (2e6 / 2e-4, 0.0), (1.25e10, 0.2)])
    def test_constant_share(self, rate: float, share: float) -> None:
        """A token takes 0.2 ms behind the last knot; its products do 2 million operations."""
        assert constant_share(oracle(), 10**6, rate) == pytest.approx(share)

    def test_nothing_to_share(self) -> None:
        free = replace(oracle().layers, row_seconds=(0.0,) * len(oracle().layers.knots))
        without: Any = replace(oracle(), layers=free)
        assert constant_share(without, 10**6, 1e9) == 0.0
