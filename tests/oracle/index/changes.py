"""Changes of the index, for its watchers: named, dropped and moved pages."""

from kvell.prefix.interface import DROPPED, MOVED, NAMED

Change = tuple[int, int, int, int, int]
"""A row of an index-changes array."""


class IndexChanges:
    """A record of changes since :meth:`watch`. Before that call it costs nothing."""

    def __init__(self) -> None:
        self._is_watched = False
        self._rows: list[Change] = []

    def watch(self) -> None:
        self._is_watched = True

    def taken(self) -> list[Change]:
        """Return the changes since the last call, in order."""
        rows, self._rows = self._rows, []
        return rows

    def on_named(self, handle: int, group: int, page: int, end: int) -> None:
        """Record that a holder's page got a name; the page ends a prefix of ``end`` tokens."""
        if self._is_watched:
            self._rows.append((NAMED, group, page, end, handle))

    def on_dropped(self, group: int, page: int, end: int) -> None:
        if self._is_watched:
            self._rows.append((DROPPED, group, page, end, 0))

    def on_moved(self, group: int, old: int, new: int, end: int) -> None:
        """Record that a named page got another number."""
        if self._is_watched:
            self._rows.append((MOVED, group, old, end, new))
