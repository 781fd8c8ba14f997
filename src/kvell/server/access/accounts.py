"""What a key has left of its requests and tokens, and how much of it is in flight."""

from typing import Literal

from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.server.access.rates import Bucket, duration_text

Unit = Literal["requests", "tokens"]


class RateExceeded(TryLater):
    """A key has used up what it may; ``retry_seconds`` later there is enough again."""

    def __init__(self, unit: Unit, limit: int, retry_seconds: int) -> None:
        self.unit, self.retry_seconds = unit, retry_seconds
        super().__init__(
            f"this key's limit of {limit} {unit} per minute is used up; "
            f"come back in {retry_seconds} s",
            bound="requests_per_minute" if unit == "requests" else "tokens_per_minute",
        )


class Account:
    """The limits of one key.

    :param requests_per_minute: None is without limit.
    :param tokens_per_minute: likewise.
    :param max_in_flight: sequences that may wait or run at once; likewise.
    :param min_priority: the lowest that requests may have; likewise.
    :ivar in_flight: sequences that wait or run here.
    :ivar others_in_flight: the same at other fronts, as far as is known.
    :ivar used: what passed here so far, less what was given back.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        now_seconds: float,
        *,
        max_in_flight: int | None = None,
        min_priority: int | None = None,
    ) -> None:
        self._max_in_flight, self._min_priority = max_in_flight, min_priority
        self.in_flight = self.others_in_flight = 0
        self.used: dict[Unit, int] = {"requests": 0, "tokens": 0}
        self._buckets: dict[Unit, Bucket] = {}
        if requests_per_minute is not None:
            self._buckets["requests"] = Bucket(requests_per_minute, now_seconds)
        if tokens_per_minute is not None:
            self._buckets["tokens"] = Bucket(tokens_per_minute, now_seconds)

    def take_request(self, now_seconds: float) -> None:
        """Count a request.

        :raises RateExceeded: when there were too many.
        """
        self._take("requests", 1, now_seconds)

    @property
    def has_limits(self) -> bool:
        """Whether it has any that is counted."""
        return bool(self._buckets) or self._max_in_flight is not None

    def check_priority(self, priority: int) -> None:
        """Check that requests of this key may have a priority.

        :raises ChangeSomething: when it is too low.
        """
        if self._min_priority is not None and priority < self._min_priority:
            problem = f"is below {self._min_priority}, the lowest of this key"
            remedy = f"use {self._min_priority} or more, or leave it out"
            raise ChangeSomething("priority", priority, problem, remedy, bound="priority")

    def enter(self, field: str, sequences: int, at_once: int, now_seconds: float) -> None:
        """Let the sequences of a request in, whose first :meth:`take_request` has counted.

        :param field: of the request that says how many.
        :param at_once: how many of them will be in flight; :meth:`leave` takes each off.
        :raises ChangeSomething: when there are more than the key may ever have.
        :raises RateExceeded: when there were too many requests; each sequence counts as one.
        :raises TryLater: when too many others are in flight.
        """
        most, bucket = self._max_in_flight, self._buckets.get("requests")
        if most is not None and at_once > most:
            raise _too_many(field, sequences, f"{most} sequences at once", most, "sequences")
        if bucket is not None and sequences > bucket.limit:
            allowed = f"{bucket.limit} requests per minute"
            raise _too_many(field, sequences, allowed, bucket.limit, "requests_per_minute")
        others = self.in_flight + self.others_in_flight
        if most is not None and others + at_once > most:
            problem = f"this key has {others} sequences in flight and may have {most}"
            raise TryLater(f"{problem}; come back when some have ended", bound="sequences")
        if sequences > 1:
            self._take("requests", sequences - 1, now_seconds)
        self.in_flight += at_once

    def leave(self, sequences: int) -> None:
        """Count so many sequences as ended."""
        self.in_flight -= sequences

    def reserve(self, prompt_tokens: int, output_tokens: int, now_seconds: float) -> None:
        """Set tokens aside for a request that may make so much output.

        :raises ChangeSomething: when it wants more than a whole minute has.
        :raises RateExceeded: when they are used up for now.
        """
        wanted = prompt_tokens + output_tokens
        bucket = self._buckets.get("tokens")
        if bucket is not None and wanted > bucket.limit:
            raise _too_large(prompt_tokens, output_tokens, bucket.limit)
        self._take("tokens", wanted, now_seconds)

    def give_back(self, tokens: int, now_seconds: float) -> None:
        """Return what was set aside and not used."""
        self.used["tokens"] -= tokens
        if "tokens" in self._buckets:
            self._buckets["tokens"].give_back(tokens, now_seconds)

    def charge(self, unit: Unit, count: int, now_seconds: float) -> None:
        """Count what has passed at other fronts; below 0, what was given back there."""
        if unit in self._buckets:
            self._buckets[unit].give_back(-count, now_seconds)

    def fall_to(self, unit: Unit, missing: int, now_seconds: float) -> None:
        """Have at most as much left as another front, where so much is missing."""
        if unit in self._buckets:
            self._buckets[unit].fall_to(missing, now_seconds)

    def missing(self, unit: Unit, now_seconds: float) -> int:
        """What is missing from the whole limit now; 0 without one."""
        bucket = self._buckets.get(unit)
        return 0 if bucket is None else max(0, bucket.missing(now_seconds))

    def headers(self, now_seconds: float) -> dict[str, str]:
        """Limits, what is left of them and when all of it is back, under OpenAI's names.

        Only those limits that it has.
        """
        told = {}
        for unit, bucket in self._buckets.items():
            reset = duration_text(bucket.milliseconds_until_full(now_seconds))
            told[f"x-ratelimit-limit-{unit}"] = str(bucket.limit)
            told[f"x-ratelimit-remaining-{unit}"] = str(bucket.remaining(now_seconds))
            told[f"x-ratelimit-reset-{unit}"] = reset
        return told

    def _take(self, unit: Unit, count: int, now_seconds: float) -> None:
        bucket = self._buckets.get(unit)
        if bucket is None or bucket.take(count, now_seconds):
            self.used[unit] += count
            return
        retry_seconds = max(1, bucket.seconds_until(count, now_seconds))
        raise RateExceeded(unit, bucket.limit, retry_seconds)


def _too_many(field: str, sequences: int, allowed: str, most: int, bound: Bound) -> ChangeSomething:
    problem = f"exceeds the {allowed} of this key"
    remedy = f"ask for at most {most} answers or inputs in one request"
    return ChangeSomething(field, f"{sequences} sequences", problem, remedy, bound=bound)


def _too_large(prompt_tokens: int, output_tokens: int, limit: int) -> ChangeSomething:
    problem = f"exceeds the {limit} tokens per minute of this key"
    if prompt_tokens >= limit:
        value, remedy = f"{prompt_tokens} tokens", f"send fewer than {limit} tokens"
        return ChangeSomething("prompt", value, problem, remedy)
    problem = f"with {prompt_tokens} tokens of prompt {problem}"
    remedy = f"allow at most {limit - prompt_tokens} tokens of output in all answers"
    return ChangeSomething("max_tokens", output_tokens, problem, remedy)
