"""The pace of an instance follows what its requests took."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.routing.pace import MOST, Pace, RequestPrice

seconds = st.floats(0.0, 1e9)
SECOND = RequestPrice(1.0)


def serve(pace: Pace, priced: RequestPrice, measured_seconds: float) -> None:
    pace.note(priced, pace.factor(priced) * priced.seconds, measured_seconds)


def served(pace: Pace, slows: float, requests: int, priced: RequestPrice = SECOND) -> None:
    """Requests at an instance that takes ``slows`` times as long as by prices."""
    for _ in range(requests):
        serve(pace, priced, slows * priced.seconds)


def misses(pace: Pace, sizes: Sequence[float], power: float) -> list[float]:
    """Serve requests whose times are a power of the priced ones; return how far each is missed."""
    found = []
    for size in sizes:
        found.append(abs(pace.factor(RequestPrice(size)) * size / size**power - 1))
        serve(pace, RequestPrice(size), size**power)
    return found


def test_the_first_request_sets_it() -> None:
    pace = Pace()
    assert pace.factor(SECOND) == 1.0
    served(pace, 3.0, 1)
    assert pace.factor(SECOND) == pytest.approx(3.0)


@pytest.mark.parametrize("slows", [0.5, 1.0, 4.0])
def test_it_follows_a_change(slows: float) -> None:
    pace = Pace()
    served(pace, 2.0, 20)
    served(pace, slows, 12)
    assert pace.factor(SECOND) == pytest.approx(slows, rel=0.05)


def test_one_disturbed_request_moves_it_little() -> None:
    pace = Pace()
    served(pace, 1.0, 20)
    served(pace, 2.0, 1)
    assert 1.0 < pace.factor(SECOND) < 1.2


def test_each_crowd_has_its_own_and_begins_with_the_nearest() -> None:
    pace = Pace()
    served(pace, 1.5, 6, RequestPrice(1.0, 1))
    assert pace.factor(RequestPrice(1.0, 3)) == pytest.approx(1.5)
    served(pace, 4.0, 1, RequestPrice(1.0, 3))
    factors = [pace.factor(RequestPrice(1.0, crowd)) for crowd in (1, 2, 3, 4)]
    assert factors == pytest.approx([1.5, 1.5, 4.0, 4.0])


@pytest.mark.parametrize("power", [0.6, 0.8, 1.25])
def test_it_learns_that_long_prompts_are_priced_too_high_or_too_low(power: float) -> None:
    sizes = [0.1, 8.0, 0.5, 3.0, 0.2, 5.0, 1.0] * 6
    found = misses(Pace(), sizes, power)
    assert max(found[-14:]) < 0.25 < max(found[:7])


@given(st.lists(st.tuples(st.floats(1e-6, 1e9), seconds, seconds, st.integers(1, 4))))
def test_it_stays_within_its_bounds(times: list[tuple[float, float, float, int]]) -> None:
    pace = Pace()
    for size, predicted, measured, crowd in times:
        pace.note(RequestPrice(size, crowd), predicted, measured)
        assert 0.99 / MOST <= pace.factor(RequestPrice(size, crowd)) <= 1.01 * MOST
