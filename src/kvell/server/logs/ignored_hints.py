"""Kinds of advice that nobody follows here: each is named in the log once."""

import logging
from collections.abc import Iterable

from kvell.server.logs.lines import tell

MOST_TOLD = 32
"""Clients choose the names, and a log must not grow with what they think of."""
MOST_CHARS = 80
EVENT = "kv_hint_ignored"

logger = logging.getLogger(__name__)


class IgnoredHints:
    """Remembers which kinds were named; further ones than ``MOST_TOLD`` are not."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, kinds: Iterable[str]) -> None:
        """Name those that were not named yet."""
        for kind in kinds:
            shown = kind[:MOST_CHARS]
            if shown not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(shown)
                tell(logger, logging.INFO, EVENT, action=shown)
