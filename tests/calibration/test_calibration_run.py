"""A calibration of an engine whose steps take a known time finds that time."""

from dataclasses import replace
from typing import Any

import pytest

from kvell.calibration.design import (
    HELD_OUT,
    LEARNED,
    QUICK_HELD_OUT,
    QUICK_LEARNED,
    Point,
    possible,
)
from kvell.calibration.rig import TimedStep
from kvell.calibration.run import Repeats, calibrate, constant_share, errors
from kvell.cost.work import Chunk
from kvell.models.sources.progress import quiet
from tests.calibration.known import known
from tests.cost.oracles import oracle, unseen


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
