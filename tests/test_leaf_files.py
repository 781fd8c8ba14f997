"""The files that every room imports: clocks, errors, words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell import vocabulary
from kvell.clock import Clock, MonotonicClock, VirtualClock
from kvell.errors import ChangeSomething, InstanceDied, KvellError, TryLater


def test_the_machines_clock_never_runs_backwards() -> None:
    clock: Clock = MonotonicClock()
    readings = [clock.now_seconds() for _ in range(50)]
    assert readings == sorted(readings)


@given(st.lists(st.floats(0, 1e6), max_size=10))
def test_virtual_time_moves_only_when_told(steps: list[float]) -> None:
    clock = VirtualClock(5.0)
    expected = 5.0
    for seconds in steps:
        clock.advance(seconds)
        expected += seconds
        assert clock.now_seconds() == clock.now_seconds() == expected


def test_virtual_time_cannot_go_back() -> None:
    clock = VirtualClock(3.0)
    with pytest.raises(ValueError, match=r"cannot go back by 0\.5 s"):
        clock.advance(-0.5)
    assert clock.now_seconds() == 3.0


def test_change_something_is_one_line_with_field_value_problem_and_remedy() -> None:
    error = ChangeSomething("--kv-memory", "1KiB", "is too small", "use 1MiB")
    assert str(error) == "--kv-memory=1KiB: is too small; use 1MiB"
    assert (error.field, error.value) == ("--kv-memory", "1KiB")
    assert (error.problem, error.remedy) == ("is too small", "use 1MiB")


def test_later_and_change_something_are_different_families() -> None:
    assert issubclass(InstanceDied, TryLater)
    assert not issubclass(TryLater, ChangeSomething)
    assert not issubclass(ChangeSomething, TryLater)
    assert all(issubclass(e, KvellError) for e in (ChangeSomething, TryLater))


def test_units_are_binary() -> None:
    assert (vocabulary.KIB, vocabulary.MIB, vocabulary.GIB) == (2**10, 2**20, 2**30)
