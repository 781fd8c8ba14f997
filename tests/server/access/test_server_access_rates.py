"""The bucket against a model in fractions, whatever is taken, given back and waited for."""

from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.server.access.accounts import MINUTE_NANOSECONDS, Bucket, duration_text
from kvell.server.access.visit import engine_salt

NANOSECOND = Fraction(1, 10**9)
limits = st.integers(1, 10_000)
waits = st.integers(0, 2 * MINUTE_NANOSECONDS)


class BucketMachine(RuleBasedStateMachine):
    """Time is kept in whole nanoseconds, so the model is exact."""

    @initialize(limit=limits, start=st.integers(0, 10**15))
    def begin(self, limit: int, start: int) -> None:
        self.limit, self.now, self.outstanding = limit, start, 0
        self.bucket = Bucket(limit, self.seconds)
        self.level = Fraction(limit)
        self.passed: list[tuple[int, int]] = []

    @property
    def seconds(self) -> float:
        return self.now / 10**9

    def fill(self, nanoseconds: int) -> None:
        rate = Fraction(self.limit, 60)
        self.level = min(Fraction(self.limit), self.level + rate * nanoseconds * NANOSECOND)

    @rule(nanoseconds=waits)
    def wait(self, nanoseconds: int) -> None:
        self.fill(nanoseconds)
        self.now += nanoseconds

    @rule(count=st.integers(0, 12_000))
    def take(self, count: int) -> None:
        is_let = count <= self.level
        assert self.bucket.take(count, self.seconds) is is_let
        if is_let:
            self.level -= count
            self.outstanding += count
            self.passed.append((self.now, count))

    @precondition(lambda self: self.outstanding > 0)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.outstanding))
        self.outstanding -= count
        self.bucket.give_back(count, self.seconds)
        self.level = min(Fraction(self.limit), self.level + count)
        self.passed.append((self.now, -count))

    @precondition(lambda self: hasattr(self, "bucket"))
    @rule(data=st.data())
    def a_wait_as_told_is_enough_and_one_second_less_is_not(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.limit))
        seconds = self.bucket.seconds_until(count, self.seconds)
        missing = max(Fraction(0), count - self.level) * 60 / self.limit
        assert missing <= seconds < missing + 1 + NANOSECOND

    @precondition(lambda self: hasattr(self, "bucket"))
    @rule()
    def it_is_full_when_it_says_and_not_a_millisecond_earlier(self) -> None:
        milliseconds = self.bucket.milliseconds_until_full(self.seconds)
        missing = (self.limit - self.level) * 60_000 / self.limit
        assert missing <= milliseconds < missing + 1

    @invariant()
    def is_the_models(self) -> None:
        if not hasattr(self, "bucket"):
            return
        assert 0 <= self.level <= self.limit
        assert self.bucket.remaining(self.seconds) == self.level // 1

    @invariant()
    def no_window_lets_more_through_than_its_definition(self) -> None:
        for first in range(len(getattr(self, "passed", ()))):
            began, total = self.passed[first][0], 0
            for now, count in self.passed[first:]:
                total += count
                window = (now - began) * NANOSECOND
                assert total <= self.limit + window * self.limit / 60


TestBucket = BucketMachine.TestCase


@given(limits, st.data())
def test_what_is_given_back_at_once_changes_nothing(limit: int, data: st.DataObject) -> None:
    bucket = Bucket(limit, 1.0)
    first = data.draw(st.integers(0, limit))
    assert bucket.take(first, 1.0)
    second = data.draw(st.integers(0, limit - first))
    assert bucket.take(second, 1.0)
    bucket.give_back(second, 1.0)
    assert bucket.remaining(1.0) == limit - first


@given(limits)
def test_a_minute_fills_it_and_never_more(limit: int) -> None:
    bucket = Bucket(limit, 0.0)
    assert bucket.take(limit, 0.0)
    assert not bucket.take(1, 0.0)
    assert bucket.remaining(30.0) == limit // 2
    assert bucket.remaining(60.0) == limit
    assert bucket.remaining(1000.0) == limit


@pytest.mark.parametrize(("limit", "count", "seconds"), [(60, 1, 1), (1, 1, 60), (7, 1, 9)])
def test_seconds_are_rounded_up(limit: int, count: int, seconds: int) -> None:
    bucket = Bucket(limit, 0.0)
    assert bucket.take(limit, 0.0)
    assert bucket.seconds_until(count, 0.0) == seconds
    assert not bucket.take(count, seconds - 1)
    assert bucket.take(count, seconds)


def test_a_clock_that_stands_or_goes_back_fills_nothing() -> None:
    bucket = Bucket(10, 5.0)
    assert bucket.take(10, 5.0)
    assert bucket.remaining(1.0) == 0
    assert bucket.remaining(5.0) == 0
    assert bucket.remaining(11.0) == 1


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (120, "120ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1007, "1.007s"),
        (8640, "8.64s"),
        (10_000, "10s"),
        (59_932, "59.932s"),
        (60_000, "1m0s"),
        (86_400, "1m26.4s"),
        (360_000, "6m0s"),
        (600_500, "10m0.5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(milliseconds: int, text: str) -> None:
    assert duration_text(milliseconds) == text


names = st.text("abc:0123456789._-", min_size=1, max_size=20)
salts = st.text(max_size=60)
near = st.one_of(salts, st.builds(engine_salt, names, salts), names)
"""Salts that look like what another tenant's engine salt begins or ends with."""


@given(names, near, names, near)
@example("a", "b", "ab", "")
@example("1", "1:1", "1:1", "1")
@example("a", ":a", "a:", "a")
def test_no_two_tenants_share_a_salt(one: str, salt: str, other: str, crafted: str) -> None:
    assume(one != other)
    assert engine_salt(one, salt) != engine_salt(other, crafted)


@given(names, salts, salts)
def test_a_tenant_keeps_its_own_salts_apart(name: str, one: str, other: str) -> None:
    assume(one != other)
    assert engine_salt(name, one) != engine_salt(name, other)
    assert engine_salt(name, one) == engine_salt(name, one)


@given(names, names, st.data())
def test_a_salt_copied_from_another_tenant_does_not_reach_it(
    victim: str, attacker: str, data: st.DataObject
) -> None:
    assume(victim != attacker)
    seen = engine_salt(victim, data.draw(salts))
    cut = data.draw(st.integers(0, len(seen)))
    assert engine_salt(attacker, seen[cut:]) != seen


@given(salts)
def test_without_a_tenant_it_is_the_clients(salt: str) -> None:
    assert engine_salt("", salt) == salt
