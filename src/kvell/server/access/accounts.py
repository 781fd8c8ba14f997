"""What a key has left of its requests and tokens."""

from typing import Literal

from kvell.errors import ChangeSomething, TryLater
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
    """

    def __init__(
        self, requests_per_minute: int | None, tokens_per_minute: int | None, now_seconds: float
    ) -> None:
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
        if "tokens" in self._buckets:
            self._buckets["tokens"].give_back(tokens, now_seconds)

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
            return
        retry_seconds = max(1, bucket.seconds_until(count, now_seconds))
        raise RateExceeded(unit, bucket.limit, retry_seconds)


def _too_large(prompt_tokens: int, output_tokens: int, limit: int) -> ChangeSomething:
    problem = f"exceeds the {limit} tokens per minute of this key"
    if prompt_tokens >= limit:
        value, remedy = f"{prompt_tokens} tokens", f"send fewer than {limit} tokens"
        return ChangeSomething("prompt", value, problem, remedy)
    problem = f"with {prompt_tokens} tokens of prompt {problem}"
    remedy = f"allow at most {limit - prompt_tokens} tokens of output in all answers"
    return ChangeSomething("max_tokens", output_tokens, problem, remedy)
