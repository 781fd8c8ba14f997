"""What OpenTelemetry's packages log: told in the server's own log, and seldom."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvell.clock import Clock
from kvell.server.logs.lines import tell
from kvell.server.logs.seldom import SeldomLine

logger = logging.getLogger(__name__)

LONGEST_PROBLEM = 300


class Complaints(logging.Handler):
    """Tells the first complaint of a minute, and how many there were since the one before.

    Each batch of spans that a dead collector does not take is complained of several times.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(logging.WARNING)
        self._line = SeldomLine(clock)

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it or count it."""
        untold = self._line.untold_if_due()
        if untold is not None:
            problem = record.getMessage()[:LONGEST_PROBLEM]
            tell(logger, logging.WARNING, "tracing_problem", problem=problem, untold=untold)


@contextmanager
def complaints_told() -> Iterator[None]:
    """While the block runs, nothing of theirs goes to stderr by itself."""
    theirs, handler = logging.getLogger("opentelemetry"), Complaints()
    theirs.addHandler(handler)
    try:
        yield
    finally:
        theirs.removeHandler(handler)
