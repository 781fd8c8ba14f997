"""Lines that would be many: the first of a minute is told, the others are counted."""

from kvell.clock import Clock, MonotonicClock
from kvell.server.access.rates import Bucket

TOLD_PER_MINUTE = 1


class SeldomLine:
    """Says when a line may be written that has the same cause again and again."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._lines = Bucket(TOLD_PER_MINUTE, self._clock.now_seconds())
        self._untold = 0

    def untold_if_due(self) -> int | None:
        """None if the line is not to be written now; else how many were not since the last."""
        if not self._lines.take(1, self._clock.now_seconds()):
            self._untold += 1
            return None
        untold, self._untold = self._untold, 0
        return untold
