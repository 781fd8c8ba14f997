"""Seams between steps: spans, nested stages, and rounds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.engine.seams.recorder import OPERATORS, Record, Recorder, Span
from bench.engine.seams.timeline import (
    ELSEWHERE,
    MIN_STEPS,
    Step,
    callbacks_cost,
    medians,
    rounds_of,
    stages_between,
)


def ticking(step: float = 1.0) -> Callable[[], float]:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    return clock


class Loop:
    def run(self, value: int) -> int:
        return value + self.inner()

    def inner(self) -> int:
        return 1

    def fail(self) -> None:
        raise ValueError("no")


def recorder_of(loop: type[Loop]) -> Recorder:
    recorder = Recorder(ticking(), ticking(0.5))
    recorder.watch_operators(loop, "inner")
    recorder.watch(loop, "run", "runner")
    recorder.watch(loop, "fail", "failing")
    return recorder


class TestRecorder:
    def test_calls_are_spans_in_order_of_ending_and_answer_as_before(self) -> None:
        class Own(Loop):
            pass

        recorder = recorder_of(Own)
        assert Own().run(4) == 5
        assert recorder.record.spans == [(OPERATORS, 2.0, 3.0), ("runner", 1.0, 4.0)]
        assert recorder.record.own == [(0.5, 1.0)]

    def test_a_call_that_raises_is_a_span_too(self) -> None:
        class Own(Loop):
            pass

        recorder = recorder_of(Own)
        with pytest.raises(ValueError, match="no"):
            Own().fail()
        assert [span[0] for span in recorder.record.spans] == ["failing"]

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        record = Record([("plan", 0.5, 1.0)], [(0.25, 0.5)], [(32, 32)], [True])
        record.write(tmp_path / "record.json")
        assert Record.read(tmp_path / "record.json") == record


class TestStages:
    def test_a_call_inside_a_call_counts_for_itself(self) -> None:
        spans = [("inner", 2.0, 3.0), ("outer", 1.0, 5.0)]
        found = stages_between(spans, 0.0, 6.0)
        assert found == {"inner": 1.0, "outer": 3.0, ELSEWHERE: 2.0}

    def test_calls_are_cut_at_the_ends(self) -> None:
        spans = [("before", 0.0, 2.0), ("after", 4.0, 9.0)]
        found = stages_between(spans, 1.0, 5.0)
        assert found == {"before": 1.0, ELSEWHERE: 2.0, "after": 1.0}

    def test_every_second_is_somebodys(self) -> None:
        spans = [("a", 1.0, 2.5), ("b", 1.5, 2.0), ("c", 2.5, 4.0), ("d", 3.0, 4.0)]
        found = stages_between(spans, 1.25, 3.5)
        assert sum(found.values()) == pytest.approx(2.25)
        assert found["a"] == pytest.approx(0.75)
        assert found["c"] == found["b"] == found["d"] == pytest.approx(0.5)

    def test_what_lies_outside_counts_for_nothing(self) -> None:
        assert stages_between([("far", 8.0, 9.0)], 1.0, 2.0) == {ELSEWHERE: 1.0}


def record_of(steps: int, batch: int) -> Record:
    """Steps of ten: eight of operators, then one of sampling and one in the loop around it."""
    spans: list[Span] = []
    for step in range(steps):
        begin = 10.0 * step
        spans += [(OPERATORS, begin, begin + 8), ("sampling", begin + 8, begin + 9)]
        spans.append(("loop", begin - 0.5, begin + 9.5))
    own = [(4.0 * step, 4.0 * step + 3) for step in range(steps)]
    return Record(spans, own, [(batch, batch)] * steps, [step % 2 == 1 for step in range(steps)])


class TestRounds:
    def test_shares_of_a_step_by_both_clocks(self) -> None:
        [steps] = rounds_of(record_of(MIN_STEPS + 1, 32), 32)
        assert len(steps) == MIN_STEPS
        assert all(step.share == pytest.approx(0.2) for step in steps)
        assert all(step.own_share == pytest.approx(0.25) for step in steps)
        assert medians(steps) == {"loop": pytest.approx(1.0), "sampling": pytest.approx(1.0)}

    def test_a_call_around_the_next_operators_counts_until_they_begin(self) -> None:
        record = record_of(MIN_STEPS + 1, 8)
        [steps] = rounds_of(record, 8)
        assert steps[0].stages["loop"] == pytest.approx(1.0)  # half before it, half behind

    def test_steps_with_prefills_or_another_batch_end_a_round(self) -> None:
        record = record_of(3 * MIN_STEPS, 32)
        record.plans[MIN_STEPS + 1] = (32, 95)
        [first, second] = rounds_of(record, 32)
        assert len(first) == MIN_STEPS
        assert len(second) == 2 * MIN_STEPS - 3
        assert rounds_of(record, 31) == []

    def test_few_steps_are_no_round(self) -> None:
        assert rounds_of(record_of(MIN_STEPS, 32), 32) == []


def step_of(operators: float, *, has_callbacks: bool) -> Step:
    return Step(operators, {"plan": 1.0}, operators, 1.0, has_callbacks)


def test_callbacks_are_compared_with_their_neighbours() -> None:
    seconds = [10.0, 10.3, 10.0, 20.6, 20.0, 20.0]
    steps = [step_of(s, has_callbacks=i % 2 == 1) for i, s in enumerate(seconds)]
    # 10.3 between 10 and 10, 20.6 between 10 and 20: +3 % and +37 %
    assert callbacks_cost(steps[:3]) == pytest.approx(0.03)
    assert callbacks_cost(steps[:5]) == pytest.approx((0.03 + (20.6 / 15 - 1)) / 2)
