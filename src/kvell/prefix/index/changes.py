"""Changes of the index, for its watchers: blocks that it names, or names no longer."""

CHANGE_COLUMNS = 5
"""Columns of an index-changes array: change, group, page, tokens of the prefix that the page ends,
and the holder's handle (``NAMED``) or the page that it is now (``MOVED``)."""
NAMED, DROPPED, MOVED = 0, 1, 2
"""Changes of the index: it names a page that it did not, names it no longer, or the page named has
another number."""

Change = tuple[int, int, int, int, int]
"""A row of an index-changes array."""


class IndexChanges:
    """Remembers changes once it is watched; costs nothing before."""

    def __init__(self) -> None:
        self._is_watched = False
        self._rows: list[Change] = []

    def watch(self) -> None:
        """Remember changes from now on."""
        self._is_watched = True

    def taken(self) -> list[Change]:
        """Changes since the last call, in order."""
        rows, self._rows = self._rows, []
        return rows

    def named(self, handle: int, group: int, page: int, end: int) -> None:
        """A holder's page ends a prefix of so many tokens, and has a name now."""
        if self._is_watched:
            self._rows.append((NAMED, group, page, end, handle))

    def dropped(self, group: int, page: int, end: int) -> None:
        """A page has no name any more."""
        if self._is_watched:
            self._rows.append((DROPPED, group, page, end, 0))

    def moved(self, group: int, old: int, new: int, end: int) -> None:
        """A named page has another number."""
        if self._is_watched:
            self._rows.append((MOVED, group, old, end, new))
