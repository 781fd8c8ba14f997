"""What a key has left, and how it is told when that is too little."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething, TryLater
from kvell.server.access.accounts import Account, ApiKey, RateExceeded
from tests.server.keyed import seconds_of


def test_a_key_without_limits_is_never_refused_and_says_nothing() -> None:
    account = Account(ApiKey("t", b"", None, None), 0.0)
    for _ in range(1000):
        account.take_request(0.0)
        account.reserve(10**9, 10**9, 0.0)
    account.give_back(5, 0.0)
    assert account.headers(0.0) == {}


def test_requests_beyond_the_limit_may_come_later() -> None:
    account = Account(ApiKey("t", b"", 2, None), 0.0)
    account.take_request(0.0)
    account.take_request(0.0)
    with pytest.raises(RateExceeded) as caught:
        account.take_request(0.0)
    assert (caught.value.unit, caught.value.retry_seconds) == ("requests", 30)
    assert isinstance(caught.value, TryLater)
    assert str(caught.value) == (
        "this key's limit of 2 requests per minute is used up; retry in 30 s"
    )
    account.take_request(30.0)


def test_tokens_are_reserved_and_given_back() -> None:
    account = Account(ApiKey("t", b"", None, 100), 0.0)
    account.reserve(20, 60, 0.0)
    with pytest.raises(RateExceeded) as caught:
        account.reserve(20, 1, 0.0)
    assert (caught.value.unit, caught.value.retry_seconds) == ("tokens", 1)
    account.give_back(55, 0.0)
    account.reserve(20, 55, 0.0)
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"


def test_what_was_refused_takes_nothing() -> None:
    account = Account(ApiKey("t", b"", None, 100), 0.0)
    account.reserve(1, 89, 0.0)
    for _ in range(3):
        with pytest.raises(RateExceeded):
            account.reserve(5, 6, 0.0)
    account.reserve(5, 5, 0.0)


@pytest.mark.parametrize(
    ("prompt", "output", "field", "remedy"),
    [
        (10, 91, "max_tokens", "allow at most 90 tokens of output in all answers"),
        (100, 1, "prompt", "send fewer than 100 tokens"),
        (101, 0, "prompt", "send fewer than 100 tokens"),
    ],
)
def test_more_than_a_whole_minute_has_is_refused_by_name(
    prompt: int, output: int, field: str, remedy: str
) -> None:
    account = Account(ApiKey("t", b"", None, 100), 0.0)
    with pytest.raises(ChangeSomething) as caught:
        account.reserve(prompt, output, 0.0)
    assert (caught.value.field, caught.value.remedy) == (field, remedy)
    assert account.headers(0.0)["x-ratelimit-remaining-tokens"] == "100"


def test_a_whole_minute_at_once_is_served() -> None:
    account = Account(ApiKey("t", b"", None, 100), 0.0)
    account.reserve(10, 90, 0.0)
    with pytest.raises(RateExceeded) as caught:
        account.reserve(10, 90, 0.0)
    assert caught.value.retry_seconds == 60


def test_headers_have_openais_names() -> None:
    account = Account(ApiKey("t", b"", 3, 100), 0.0)
    account.take_request(0.0)
    account.reserve(1, 9, 0.0)
    assert account.headers(0.0) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "20s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "90",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert set(Account(ApiKey("t", b"", 3, None), 0.0).headers(0.0)) == {
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
    }


def test_a_reset_comes_nearer_and_is_there_when_all_is_back() -> None:
    account = Account(ApiKey("t", b"", None, 1000), 0.0)
    account.reserve(1, 3, 0.0)
    told = [
        account.headers(now)["x-ratelimit-reset-tokens"] for now in (0.0, 0.12, 0.2399, 0.24, 9.0)
    ]
    assert told == ["240ms", "120ms", "1ms", "0s", "0s"]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 500), st.floats(0, 90, width=32))
def test_whoever_is_to_come_back_later_is_told_no_longer_than_the_reset(
    limit: int, used: int, wanted: int, later: float
) -> None:
    account = Account(ApiKey("t", b"", None, limit), 0.0)
    account.reserve(min(used, limit), 0, 0.0)
    try:
        account.reserve(min(wanted, limit), 0, later)
    except RateExceeded as refused:
        reset = seconds_of(account.headers(later)["x-ratelimit-reset-tokens"])
        assert 1 <= refused.retry_seconds <= max(1, math.ceil(reset))


def test_what_is_refused_takes_nothing() -> None:
    account = Account(ApiKey("t", b"", 10, max_in_flight=4, min_priority=2), 0.0)
    for sequences, at_once, bound in ((5, 5, "sequences"), (11, 1, "requests_per_minute")):
        with pytest.raises(ChangeSomething) as caught:
            account.enter("n", sequences, at_once, 0.0)
        assert (caught.value.field, caught.value.bound) == ("n", bound)
    account.enter("n", 8, 3, 0.0)
    with pytest.raises(RateExceeded):
        account.enter("n", 5, 1, 0.0)
    assert (account.in_flight, account.used["requests"]) == (3, 7)
    account.leave(3)
    assert account.in_flight == 0
    with pytest.raises(ChangeSomething, match="priority=1: is below 2"):
        account.check_priority(1)
    account.check_priority(2)
