"""Fields of requests that nobody knows: each is told once."""

import logging
from collections.abc import Iterable

from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

MOST_TOLD = 256
"""Names that are told; who invents names must not fill a disk."""
LONGEST_NAME = 100


class IgnoredFields:
    """Writes one line for each unknown field, however many requests bring it."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Tell of those fields that no request had before."""
        for name in sorted({one[:LONGEST_NAME] for one in names} - self._told):
            if len(self._told) >= MOST_TOLD:
                return
            self._told.add(name)
            tell(logger, logging.INFO, "field_ignored", field=name)
