"""A calibration that ends in time, with the points that it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.calibration.design import PRICED, Point, TimeBudget
from kvell.calibration.run import FIT_SECONDS, Repeats, calibrate_within, measure
from kvell.clock import VirtualClock
from kvell.cost.fit import MeasuredStep, fit_operators
from kvell.cost.prices import ExecCosts, prices_of
from kvell.cost.work import Chunk, Work
from kvell.models.sources.progress import quiet
from tests.calibration.known import Known, KnownRunner, known
from tests.cost.oracles import SHAPE, decodes, prompt
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
