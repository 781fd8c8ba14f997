"""The pace of an instance follows what its requests took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.routing.pace import MOST, Pace

seconds = st.floats(0.0, 1e9)


def served(pace: Pace, slows: float, requests: int, crowd: int = 1) -> None:
    """Requests of a second by their prices, at an instance that takes ``slows`` times as long."""
    for _ in range(requests):
        pace.note(pace.factor(crowd), slows, crowd)


def test_the_first_request_sets_it() -> None:
    pace = Pace()
    assert pace.factor(1) == 1.0
    served(pace, 3.0, 1)
    assert pace.factor(1) == pytest.approx(3.0)


@pytest.mark.parametrize("slows", [0.5, 1.0, 4.0])
def test_it_follows_a_change(slows: float) -> None:
    pace = Pace()
    served(pace, 2.0, 20)
    served(pace, slows, 12)
    assert pace.factor(1) == pytest.approx(slows, rel=0.05)


def test_one_disturbed_request_moves_it_little() -> None:
    pace = Pace()
    served(pace, 1.0, 20)
    served(pace, 2.0, 1)
    assert 1.0 < pace.factor(1) < 1.2


def test_each_crowd_has_its_own_and_begins_with_the_nearest() -> None:
    pace = Pace()
    served(pace, 1.5, 6, crowd=1)
    assert pace.factor(3) == pytest.approx(1.5)
    served(pace, 4.0, 1, crowd=3)
    factors = [pace.factor(crowd) for crowd in (1, 2, 3, 4)]
    assert factors == pytest.approx([1.5, 1.5, 4.0, 4.0])


@given(st.lists(st.tuples(seconds, seconds, st.integers(1, 4))))
def test_it_stays_within_its_bounds(times: list[tuple[float, float, int]]) -> None:
    pace = Pace()
    for predicted, measured, crowd in times:
        pace.note(predicted, measured, crowd)
        assert 0.99 / MOST <= pace.factor(crowd) <= 1.01 * MOST
