"""Time in which its owner was there."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.clock import AttendedClock, VirtualClock


@given(st.lists(st.floats(0, 1e6)))
def test_a_gap_counts_for_a_bounded_time(gaps: list[float]) -> None:
    clock, expected_seconds = VirtualClock(3.0), 0.0
    one = AttendedClock(clock, 1.0)
    for gap_seconds in gaps:
        before_seconds = clock.now_seconds()
        clock.advance(gap_seconds)
        expected_seconds += min(1.0, clock.now_seconds() - before_seconds)
        assert one.now_seconds() == expected_seconds
        assert one.now_seconds() == expected_seconds
