"""What clients send and nobody follows: each kind is told once."""

import logging
from collections.abc import Iterable

from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

MOST_TOLD = 256
"""Names that are told; who invents names must not fill a disk."""
LONGEST_NAME = 100


class Ignored:
    """Writes one line for each name, however many requests bring it.

    :param event: of the lines.
    :param what: the field of a line that has the name.
    """

    def __init__(self, event: str, what: str) -> None:
        self._event, self._what = event, what
        self._told: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Tell of those that no request had before."""
        for name in sorted({one[:LONGEST_NAME] for one in names} - self._told):
            if len(self._told) >= MOST_TOLD:
                return
            self._told.add(name)
            tell(logger, logging.INFO, self._event, **{self._what: name})
