"""Schedules: when requests arrive, and which wait for another's answer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.simulator.replay.schedule import Arrivals, Schedule
from kvell.simulator.traces.rows import TraceRow, predecessors
from tests.simulator.replays import row


def at(seconds: float, session: str | None = None) -> TraceRow:
    return replace(row(4, 1, at=seconds), session=session)


def schedule(
    rows: Sequence[TraceRow], arrivals: Arrivals = "trace", refused: Sequence[int] = ()
) -> Schedule:
    return Schedule(rows, arrivals, lambda index: index not in refused)


def times(plan: Schedule) -> list[tuple[float | None, int]]:
    found = []
    while len(plan):
        found.append((plan.next_seconds(), plan.pop()))
    return found


class TestWithoutSessions:
    def test_at_their_times(self) -> None:
        plan = schedule([at(0.0), at(2.5), at(7.0)])
        assert times(plan) == [(0.0, 0), (2.5, 1), (7.0, 2)]
        assert plan.next_seconds() is None

    def test_all_at_the_start(self) -> None:
        assert times(schedule([at(0.0), at(2.5)], "start")) == [(0.0, 0), (0.0, 1)]

    def test_refused_ones_never_come(self) -> None:
        plan = schedule([at(0.0), at(1.0), at(2.0)], refused=[1])
        assert plan.refused == [1]
        assert times(plan) == [(0.0, 0), (2.0, 2)]

    def test_due(self) -> None:
        plan = schedule([at(0.0), at(1.0), at(2.0)])
        assert [plan.num_due(now) for now in (-1.0, 0.0, 1.5, 2.0)] == [0, 1, 2, 3]

    def test_an_end_calls_nobody(self) -> None:
        plan = schedule([at(0.0), at(9.0)])
        plan.pop()
        plan.on_ended(0, 1.0)
        assert len(plan) == 1


class TestSessions:
    def test_a_turn_keeps_the_gap_of_the_trace(self) -> None:
        plan = schedule([at(1.0, "s"), at(6.0, "s")])
        assert times(plan) == [(1.0, 0)]
        plan.on_ended(0, 3.0)
        assert times(plan) == [(6.0, 1)]

    def test_but_waits_for_the_answer(self) -> None:
        plan = schedule([at(1.0, "s"), at(6.0, "s"), at(8.0, "s")])
        plan.pop()
        plan.on_ended(0, 20.0)
        assert times(plan) == [(20.0, 1)]
        plan.on_ended(1, 21.0)
        assert times(plan) == [(22.0, 2)]  # 2 s after the turn before it came, as in the trace

    def test_from_the_start_a_turn_comes_with_the_answer(self) -> None:
        plan = schedule([at(1.0, "s"), at(6.0, "s")], "start")
        assert times(plan) == [(0.0, 0)]
        plan.on_ended(0, 3.0)
        assert times(plan) == [(3.0, 1)]

    def test_sessions_do_not_wait_for_each_other(self) -> None:
        plan = schedule([at(0.0, "a"), at(1.0, "b"), at(2.0, "a"), at(3.0, "b"), at(4.0)])
        assert times(plan) == [(0.0, 0), (1.0, 1), (4.0, 4)]
        plan.on_ended(1, 1.5)
        assert times(plan) == [(3.0, 3)]

    @pytest.mark.parametrize(("arrivals", "comes"), [("trace", 5.0), ("start", 0.0)])
    def test_after_a_refused_turn_the_next_one_comes(
        self, arrivals: Arrivals, comes: float
    ) -> None:
        rows = [at(1.0, "s"), at(4.0, "s"), at(5.0, "s")]
        plan = schedule(rows, arrivals, refused=[0, 1])
        assert plan.refused == [0, 1]
        assert times(plan) == [(comes, 2)]

    def test_a_refused_turn_in_the_middle(self) -> None:
        plan = schedule([at(1.0, "s"), at(4.0, "s"), at(9.0, "s")], refused=[1])
        plan.pop()
        plan.on_ended(0, 6.0)
        assert plan.refused == [1]
        assert times(plan) == [(11.0, 2)]

    def test_a_turn_that_was_taken_may_be_refused(self) -> None:
        plan = schedule([at(1.0, "s"), at(4.0, "s")])
        plan.refuse(plan.pop(), 1.0)
        assert plan.refused == [0]
        assert times(plan) == [(4.0, 1)]

    def test_nobody_left(self) -> None:
        plan = schedule([at(1.0, "s"), at(4.0, "s")], refused=[0, 1])
        assert (len(plan), plan.refused) == (0, [0, 1])

    def test_sessions_may_be_ignored(self) -> None:
        rows = [at(1.0, "s"), at(4.0, "s")]
        plan = Schedule(rows, "trace", lambda _: True, sessions=False)
        assert times(plan) == [(1.0, 0), (4.0, 1)]


@given(
    st.lists(st.tuples(st.floats(0, 9), st.sampled_from(["a", "b", None])), max_size=25),
    st.sampled_from(["start", "trace"]),
    st.floats(0.1, 5),
    st.sets(st.integers(0, 24)),
)
def test_everyone_comes_once_and_after_the_answer(
    drawn: list[tuple[float, str | None]],
    arrivals: Arrivals,
    service_seconds: float,
    refused: set[int],
) -> None:
    now_seconds, rows = 0.0, list[TraceRow]()
    for gap_seconds, session in drawn:
        now_seconds += gap_seconds
        rows.append(at(now_seconds, session))
    plan = schedule(rows, arrivals, list(refused))
    came: dict[int, float] = {}
    ends: dict[int, float] = {}
    now_seconds = 0.0
    while len(plan):
        now_seconds = max(now_seconds, plan.next_seconds() or 0.0)
        came_seconds = plan.next_seconds()
        index = plan.pop()
        assert index not in came
        assert came_seconds is not None
        came[index] = came_seconds
        now_seconds += service_seconds
        ends[index] = now_seconds
        plan.on_ended(index, now_seconds)
    assert sorted([*came, *plan.refused]) == list(range(len(rows)))
    for index, before in enumerate(predecessors(rows)):
        if before in ends and index in came:
            assert came[index] >= ends[before]
        if index in came and arrivals == "trace":
            assert came[index] >= rows[index].arrival_s - 1e-6


class TestThinking:
    """Given think times, the trace's gaps between turns do not matter."""

    def plan(self) -> Schedule:
        rows = [at(1.0, "s"), at(6.0, "s"), at(2.0), at(7.0, "s")]
        return Schedule(rows, "trace", lambda _: True, think_seconds=[99.0, 0.5, 99.0, 0.0])

    def test_begins_when_the_answer_has_ended(self) -> None:
        plan = self.plan()
        assert times(plan) == [(1.0, 0), (2.0, 2)]
        plan.on_ended(0, 3.0)
        assert times(plan) == [(3.5, 1)]
        plan.on_ended(1, 30.0)
        assert times(plan) == [(30.0, 3)]

    def test_others_keep_their_times(self) -> None:
        plan = self.plan()
        plan.on_ended(2, 50.0)
        assert times(plan) == [(1.0, 0), (2.0, 2)]
