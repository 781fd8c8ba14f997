"""A rate limit per minute: a token bucket in whole numbers."""

import math

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
