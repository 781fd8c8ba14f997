"""Warnings of OpenTelemetry's packages, written to the server's log at most once a minute."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvell.clock import Clock
from kvell.server.logs.lines import tell
from kvell.server.logs.seldom import SeldomLine

logger = logging.getLogger(__name__)

LONGEST_PROBLEM = 300


class Complaints(logging.Handler):
    """A handler that logs one warning a minute, with the number of suppressed warnings.

    The packages log several warnings for each batch that a dead collector does not accept.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(logging.WARNING)
        self._line = SeldomLine(clock)

    def emit(self, record: logging.LogRecord) -> None:
        untold = self._line.untold_if_due()
        if untold is not None:
            problem = record.getMessage()[:LONGEST_PROBLEM]
            tell(logger, logging.WARNING, "tracing_problem", problem=problem, untold=untold)


@contextmanager
def complaints_told() -> Iterator[None]:
    """Redirect the packages' warnings from stderr to the server's log while the block runs."""
    theirs = logging.getLogger("opentelemetry")
    handler = Complaints()
    theirs.addHandler(handler)
    try:
        yield
    finally:
        theirs.removeHandler(handler)
