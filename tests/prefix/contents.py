"""What every page holds, as an engine would have written it: the bytes, told by their meaning.

A slot of a token group holds the number of the prefix that its token ends, a state the
number of the prefix it stands for, a page of an image that of the prefix it ends.  Whatever
reads a page says which of these it must find.
"""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind, GroupSpec, Layout

GARBAGE = 0
PARTS = 32
"""Pages of a state or an image are told apart: prefix × PARTS + part."""


class Prefixes:
    """Numbers for prefixes: equal number, equal tokens from the first on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}
        self.lengths = [0]

    def chain(self, root: str, tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
        """Number of every prefix of ``tokens``; those of the first ones may be known."""
        chain = list(known)
        before: object = chain[-1] if chain else root
        for token in tokens[len(chain) :]:
            before = self._numbers.setdefault((before, token), len(self.lengths))
            if before == len(self.lengths):
                self.lengths.append(len(chain) + 1)
            chain.append(before)
        return chain


class Contents:
    """Slots of all pages, by group and page."""

    def __init__(self, layout: Layout) -> None:
        self._sizes = [slots_of(group) for group in layout.groups]
        self._slots: list[dict[int, list[int]]] = [{} for _ in layout.groups]

    def add_groups(self, groups: Sequence[GroupSpec]) -> None:
        self._sizes.extend(slots_of(group) for group in groups)
        self._slots.extend({} for _ in groups)

    def given(self, group: int, page: int) -> None:
        """The page is somebody else's now; what it holds is nobody's business."""
        self._slots[group][page] = [GARBAGE] * self._sizes[group]

    def copy(self, group: int, source: int, target: int) -> None:
        self._slots[group][target] = list(self._slots[group][source])

    def last(self, group: int, page: int, end: int) -> int:
        """What the slot of token ``end - 1`` holds."""
        return self._slots[group][page][(end - 1) % self._sizes[group]]

    def whole(self, group: int, page: int) -> list[int]:
        return self._slots[group][page]

    def write(self, group: int, pages: dict[int, int], start: int, values: Sequence[int]) -> None:
        """Values of slots ``start …``, counted through pages by position."""
        size = self._sizes[group]
        slots = self._slots[group]
        for slot, value in enumerate(values, start=start):
            slots[pages[slot // size]][slot % size] = value

    def read(self, group: int, pages: dict[int, int], start: int, end: int) -> list[int]:
        """What slots ``start … end-1`` hold."""
        size, slots = self._sizes[group], self._slots[group]
        found: list[int] = []
        for position in range(start // size, -(-end // size)):
            base = position * size
            found.extend(slots[pages[position]][max(start - base, 0) : end - base])
        return found


def slots_of(group: GroupSpec) -> int:
    return 1 if group.kind is GroupKind.STATE else group.page_tokens
