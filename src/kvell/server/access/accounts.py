"""The account of an API key: requests and tokens left this minute, and sequences in flight."""

import math
from dataclasses import dataclass
from typing import Literal

from kvell.errors import Bound, ChangeSomething, TryLater

MINUTE_NANOSECONDS = 60 * 10**9


class Bucket:
    """A token bucket that fills evenly, in a minute from empty to full.

    In any ``s`` seconds at most ``limit + s * limit / 60`` pass, less refunds.  The unit of the
    level is so small that a nanosecond adds a whole number of units, so sums are exact.

    :param limit_per_minute: rate, and size of a burst after a pause.
    :param now_seconds: time of a clock that never runs backwards; also in all methods.
    """

    def __init__(self, limit_per_minute: int, now_seconds: float) -> None:
        self.limit = limit_per_minute
        self._most = limit_per_minute * MINUTE_NANOSECONDS
        self._level = self._most
        self._filled_nanoseconds = _nanoseconds(now_seconds)

    def take(self, count: int, now_seconds: float) -> bool:
        """Let ``count`` pass if there is enough; else change nothing."""
        self._fill(now_seconds)
        if count * MINUTE_NANOSECONDS > self._level:
            return False
        self._level -= count * MINUTE_NANOSECONDS
        return True

    def give_back(self, count: int, now_seconds: float) -> None:
        """Undo a part of what was taken; the bucket is never more than full.

        A negative count takes what has passed at another front.  The level may become negative;
        then nothing passes here until it is refilled.
        """
        self._fill(now_seconds)
        self._level = min(self._most, self._level + count * MINUTE_NANOSECONDS)

    def fall_to(self, missing: int, now_seconds: float) -> None:
        self._fill(now_seconds)
        self._level = min(self._level, self._most - missing * MINUTE_NANOSECONDS)

    def missing(self, now_seconds: float) -> int:
        self._fill(now_seconds)
        return (self._most - self._level) // MINUTE_NANOSECONDS

    def remaining(self, now_seconds: float) -> int:
        self._fill(now_seconds)
        return max(0, self._level // MINUTE_NANOSECONDS)

    def seconds_until(self, count: int, now_seconds: float) -> int:
        """Return the seconds until ``count`` may pass if nothing else does, rounded up.

        ``count`` is at most the limit.
        """
        self._fill(now_seconds)
        missing = max(0, count * MINUTE_NANOSECONDS - self._level)
        return math.ceil(-(-missing // self.limit) / 10**9)

    def milliseconds_until_full(self, now_seconds: float) -> int:
        self._fill(now_seconds)
        return -(-(self._most - self._level) // (self.limit * 10**6))

    def _fill(self, now_seconds: float) -> None:
        now = _nanoseconds(now_seconds)
        passed = max(0, now - self._filled_nanoseconds)
        self._filled_nanoseconds += passed
        self._level = min(self._most, self._level + passed * self.limit)


def duration_text(milliseconds: int) -> str:
    """Return a duration as OpenAI's headers write it: ``120ms``, ``1s``, ``8.64s``, ``6m0s``."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    fraction = f".{rest % 1000:03d}".rstrip("0").rstrip(".")
    seconds = f"{rest // 1000}{fraction}s"
    return f"{minutes}m{seconds}" if minutes else seconds


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 10**9)


Unit = Literal["requests", "tokens"]


class RateExceeded(TryLater):
    """An exceeded rate limit of a key; a request may pass ``retry_seconds`` later."""

    def __init__(self, unit: Unit, limit: int, retry_seconds: int) -> None:
        self.unit, self.retry_seconds = unit, retry_seconds
        super().__init__(
            f"this key's limit of {limit} {unit} per minute is used up; retry in {retry_seconds} s",
            bound="requests_per_minute" if unit == "requests" else "tokens_per_minute",
        )


@dataclass(frozen=True)
class ApiKey:
    """A key that clients may send.

    A limit that is None is unlimited.

    :param tenant: owner; keys of one tenant share cached prefixes.
    :param digest: SHA-256 of the key; the key itself is not stored.
    :param tokens_per_minute: limit of prompts and outputs together.
    :param is_operator: whether the key gives access to ``/cluster`` and ``/debug``.
    :param min_priority: lowest priority of requests; the lowest number is served first.
    """

    tenant: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    is_operator: bool = False
    max_in_flight: int | None = None
    min_priority: int | None = None


class Account:
    """A key, and what is left of its limits.

    :ivar in_flight: sequences that wait or run at this front.
    :ivar others_in_flight: sequences that wait or run at other fronts, by their latest reports.
    :ivar used: requests and tokens counted at this front so far, less refunds.
    """

    def __init__(self, key: ApiKey, now_seconds: float) -> None:
        self.key = key
        self.in_flight = self.others_in_flight = 0
        self.used: dict[Unit, int] = {"requests": 0, "tokens": 0}
        self._buckets: dict[Unit, Bucket] = {}
        if key.requests_per_minute is not None:
            self._buckets["requests"] = Bucket(key.requests_per_minute, now_seconds)
        if key.tokens_per_minute is not None:
            self._buckets["tokens"] = Bucket(key.tokens_per_minute, now_seconds)

    def take_request(self, now_seconds: float) -> None:
        """Count a request.

        :raises RateExceeded: when the limit is used up.
        """
        self._take("requests", 1, now_seconds)

    @property
    def has_limits(self) -> bool:
        return bool(self._buckets) or self.key.max_in_flight is not None

    def check_priority(self, priority: int) -> None:
        """Check that requests of this key may have a priority.

        :raises ChangeSomething: when the priority is too low.
        """
        lowest = self.key.min_priority
        if lowest is not None and priority < lowest:
            problem = f"is below {lowest}, the lowest of this key"
            remedy = f"use {lowest} or more, or leave it out"
            raise ChangeSomething("priority", priority, problem, remedy, bound="priority")

    def enter(self, field: str, sequences: int, at_once: int, now_seconds: float) -> None:
        """Count the sequences of a request; :meth:`take_request` has counted the first.

        :param field: the request's field that sets the number of sequences; for errors.
        :param at_once: sequences that will be in flight together; :meth:`leave` takes each off.
        :raises ChangeSomething: when the number exceeds a limit even of an idle key.
        :raises RateExceeded: when the limit of requests is used up; a sequence counts as a request.
        :raises TryLater: when too many other sequences are in flight.
        """
        limit = self.key.max_in_flight
        bucket = self._buckets.get("requests")
        if limit is not None and at_once > limit:
            raise _too_many(field, sequences, f"{limit} concurrent sequences", limit, "sequences")
        if bucket is not None and sequences > bucket.limit:
            allowed = f"{bucket.limit} requests per minute"
            raise _too_many(field, sequences, allowed, bucket.limit, "requests_per_minute")
        others = self.in_flight + self.others_in_flight
        if limit is not None and others + at_once > limit:
            problem = f"this key has {others} sequences in flight and may have {limit}"
            raise TryLater(f"{problem}; retry when some have ended", bound="sequences")
        if sequences > 1:
            self._take("requests", sequences - 1, now_seconds)
        self.in_flight += at_once

    def leave(self, sequences: int) -> None:
        self.in_flight -= sequences

    def reserve(self, prompt_tokens: int, output_tokens: int, now_seconds: float) -> None:
        """Reserve tokens for a request's prompts and its longest possible output.

        :raises ChangeSomething: when the sum exceeds the limit of a minute.
        :raises RateExceeded: when too few tokens are left now.
        """
        wanted = prompt_tokens + output_tokens
        bucket = self._buckets.get("tokens")
        if bucket is not None and wanted > bucket.limit:
            raise _too_large(prompt_tokens, output_tokens, bucket.limit)
        self._take("tokens", wanted, now_seconds)

    def give_back(self, tokens: int, now_seconds: float) -> None:
        self.used["tokens"] -= tokens
        if "tokens" in self._buckets:
            self._buckets["tokens"].give_back(tokens, now_seconds)

    def charge_others(self, unit: Unit, count: int, now_seconds: float) -> None:
        """Count requests or tokens of other fronts; a count below 0 is a refund there."""
        if unit in self._buckets:
            self._buckets[unit].give_back(-count, now_seconds)

    def fall_to(self, unit: Unit, missing: int, now_seconds: float) -> None:
        if unit in self._buckets:
            self._buckets[unit].fall_to(missing, now_seconds)

    def missing(self, unit: Unit, now_seconds: float) -> int:
        """Return the used part of a limit that is not refilled yet; 0 without a limit."""
        bucket = self._buckets.get(unit)
        return 0 if bucket is None else max(0, bucket.missing(now_seconds))

    def headers(self, now_seconds: float) -> dict[str, str]:
        """Return each limit, its remainder and its time until full as OpenAI's headers."""
        headers = {}
        for unit, bucket in self._buckets.items():
            reset = duration_text(bucket.milliseconds_until_full(now_seconds))
            headers[f"x-ratelimit-limit-{unit}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(bucket.remaining(now_seconds))
            headers[f"x-ratelimit-reset-{unit}"] = reset
        return headers

    def _take(self, unit: Unit, count: int, now_seconds: float) -> None:
        bucket = self._buckets.get(unit)
        if bucket is None or bucket.take(count, now_seconds):
            self.used[unit] += count
            return
        retry_seconds = max(1, bucket.seconds_until(count, now_seconds))
        raise RateExceeded(unit, bucket.limit, retry_seconds)


def _too_many(
    field: str, sequences: int, allowed: str, limit: int, bound: Bound
) -> ChangeSomething:
    problem = f"exceeds the {allowed} of this key"
    remedy = f"ask for at most {limit} answers or inputs in one request"
    return ChangeSomething(field, f"{sequences} sequences", problem, remedy, bound=bound)


def _too_large(prompt_tokens: int, output_tokens: int, limit: int) -> ChangeSomething:
    problem = f"exceeds the {limit} tokens per minute of this key"
    if prompt_tokens >= limit:
        value, remedy = f"{prompt_tokens} tokens", f"send fewer than {limit} tokens"
        return ChangeSomething("prompt", value, problem, remedy)
    problem = f"with {prompt_tokens} tokens of prompt {problem}"
    remedy = f"allow at most {limit - prompt_tokens} tokens of output in all answers"
    return ChangeSomething("max_tokens", output_tokens, problem, remedy)
