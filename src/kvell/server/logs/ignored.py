"""A log of ignored request fields: each name is logged once."""

import logging
from collections.abc import Iterable

from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

MOST_TOLD = 256
"""The most names that are logged, so that clients with random names cannot fill a disk."""
LONGEST_NAME = 100


class OncePerName:
    """A log with one line per name.

    :param event: event of the lines.
    :param what: field of a line that has the name.
    """

    def __init__(self, event: str, what: str) -> None:
        self._event, self._what = event, what
        self._told: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in sorted({name[:LONGEST_NAME] for name in names} - self._told):
            if len(self._told) >= MOST_TOLD:
                return
            self._told.add(name)
            tell(logger, logging.INFO, self._event, **{self._what: name})
