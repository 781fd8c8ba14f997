"""What OpenTelemetry's packages log: told in the server's own log, and seldom."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvell.clock import Clock, MonotonicClock
from kvell.server.access.rates import Bucket
from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

TOLD_PER_MINUTE = 1
"""Each batch of spans that a dead collector does not take is complained of several times."""
LONGEST_PROBLEM = 300


class Complaints(logging.Handler):
    """Tells the first complaint of a minute, and how many there were since the one before."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock or MonotonicClock()
        self._lines = Bucket(TOLD_PER_MINUTE, self._clock.now_seconds())
        self._untold = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it or count it."""
        if not self._lines.take(1, self._clock.now_seconds()):
            self._untold += 1
            return
        problem = record.getMessage()[:LONGEST_PROBLEM]
        tell(logger, logging.WARNING, "tracing_problem", problem=problem, untold=self._untold)
        self._untold = 0


@contextmanager
def complaints_told() -> Iterator[None]:
    """While the block runs, nothing of theirs goes to stderr by itself."""
    theirs, handler = logging.getLogger("opentelemetry"), Complaints()
    theirs.addHandler(handler)
    try:
        yield
    finally:
        theirs.removeHandler(handler)
