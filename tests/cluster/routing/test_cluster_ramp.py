"""Slow start of an instance that joins others."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.routing.instance_pace import FIRST_REQUESTS, Ramp


def test_grows_with_every_first_token_until_the_credits() -> None:
    ramp, limits = Ramp(FIRST_REQUESTS + 3), []
    for _ in range(4):
        limits.append(ramp.limit)
        ramp.first_token()
    assert limits == [FIRST_REQUESTS, FIRST_REQUESTS + 1, FIRST_REQUESTS + 2, None]
    assert ramp.limit is None


def test_few_credits_are_bound_enough() -> None:
    assert Ramp(FIRST_REQUESTS).limit is None
    assert Ramp(1).limit is None


def test_one_more_is_allowed_below_the_limit() -> None:
    ramp = Ramp(64)
    assert [ramp.allows(in_flight) for in_flight in (0, FIRST_REQUESTS - 1, FIRST_REQUESTS)] == [
        True,
        True,
        False,
    ]


@given(st.integers(1, 300), st.integers(0, 300))
def test_never_allows_less_later(credit: int, tokens: int) -> None:
    ramp = Ramp(credit)
    allowed = 0
    for _ in range(tokens):
        now = sum(ramp.allows(in_flight) for in_flight in range(credit))
        assert now >= max(allowed, min(credit, FIRST_REQUESTS))
        allowed = now
        ramp.first_token()
    assert (ramp.limit is None) == (credit <= FIRST_REQUESTS + tokens)
