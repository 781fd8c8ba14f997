"""Rate-limited log lines: by default one a minute is written, the others are counted."""

from kvell.clock import Clock, MonotonicClock
from kvell.server.access.accounts import Bucket

TOLD_PER_MINUTE = 1


class SeldomLine:
    """A rate limit for lines with the same cause."""

    def __init__(self, clock: Clock | None = None, per_minute: int = TOLD_PER_MINUTE) -> None:
        self._clock = clock or MonotonicClock()
        self._lines = Bucket(per_minute, self._clock.now_seconds())
        self._untold = 0

    def untold_if_due(self) -> int | None:
        """Return the number of lines that were suppressed; None if this line must be too."""
        if not self._lines.take(1, self._clock.now_seconds()):
            self._untold += 1
            return None
        untold, self._untold = self._untold, 0
        return untold
