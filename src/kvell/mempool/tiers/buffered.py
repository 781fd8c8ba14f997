"""Pages of texts in host memory, named as the pool's index names them.

A page's key has the digest of all tokens up to its end, its group, and the part that tells pages of
one end apart: the radix index's path and place.  So texts that begin alike share pages, and a page
that is half full, or a state, is found only where its text ended.  Pages are dropped least recently
used first; within a text, from its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvell.elastic.page_buffer import PageBuffer
from kvell.memory import GroupKind, GroupSpec, policy_of
from kvell.mempool.tiers.digests import Digest, PrefixDigests

FIRST_HOLDER = 1 << 40
"""First holder id used here; those of preempted requests are below it."""

Place = tuple[int, int]
"""(end, part): tokens of the prefix that a page ends, and which of the pages there it is."""
Key = tuple[int, Digest, int]
"""Group; digest of all tokens up to the page's end; part."""


@dataclass
class _Page:
    """A page of the buffer.

    :param end: tokens of the prefix that it ends.
    :param used: the last plan that copied it.
    """

    holder: int
    page: int
    end: int
    used: int


class BufferedPages:
    """An index of the buffer's pages that hold texts."""

    def __init__(self, groups: Sequence[GroupSpec], buffer: PageBuffer) -> None:
        self.groups = groups
        self._buffer = buffer
        self._pages: OrderedDict[Key, _Page] = OrderedDict()  # least recently used first
        self._ends: Counter[int] = Counter()
        self._pins: Counter[Key] = Counter()
        self._next_holder = FIRST_HOLDER
        self._plan = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def begin(self) -> None:
        """Begin a plan; pages that it copies stay until it has run."""
        self._plan += 1

    def ends(self) -> list[int]:
        """Where states and half-full pages end, in tokens, whatever their text."""
        return list(self._ends)

    # ---------------------------------------------------------------- coming and going

    def put(self, group: int, place: Place, digests: PrefixDigests) -> int | None:
        """Take a page of the buffer for a page that is not in it; None if there is no room."""
        need = [0] * len(self.groups)
        need[group] = 1
        self.make_room(need)
        pages = self._buffer.hold(self._next_holder, need)
        if pages is None:
            return None
        [page] = pages[group]
        self._pages[key(group, place, digests)] = _Page(
            self._next_holder, page, place[0], self._plan
        )
        if is_mark(self.groups[group], place[0]):
            self._ends[place[0]] += 1
        self._next_holder += 1
        return page

    def page(self, key: Key) -> int:
        """The page of the buffer that holds a page.

        :raises KeyError: if none does.
        """
        return self._pages[key].page

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark pages as used now, the last of them most recently."""
        for one in keys:
            if one in self._pages:
                self._pages.move_to_end(one)
                self._pages[one].used = self._plan

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep pages until they are unpinned as often."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo :meth:`pin`."""
        self._pins.subtract(keys)
        self._pins = +self._pins

    def is_pinned(self, key: Key) -> bool:
        """Whether a page is pinned."""
        return key in self._pins

    def make_room(self, need: Sequence[int]) -> None:
        """Drop pages until ``need`` pages of each group fit, or no more may be dropped."""
        while not self._buffer.has_room(need):
            one = next((one for one in self._pages if one not in self._pins), None)
            if one is None or self._pages[one].used == self._plan:
                return
            self._drop(one)

    def forget(self, keys: Iterable[Key]) -> int:
        """Drop pages that are here and not pinned; returns their number."""
        going = [one for one in keys if one in self._pages and one not in self._pins]
        for one in going:
            self._drop(one)
        return len(going)

    def clear(self) -> None:
        """Drop all pages."""
        for one in list(self._pages):
            self._drop(one)

    def _drop(self, one: Key) -> None:
        gone = self._pages.pop(one)
        self._buffer.drop(gone.holder)
        if is_mark(self.groups[one[0]], gone.end):
            self._ends[gone.end] -= 1
            self._ends = +self._ends


def key(group: int, place: Place, digests: PrefixDigests) -> Key:
    """The key of a text's page."""
    return group, digests.of(place[0]), place[1]


def is_mark(group: GroupSpec, end: int) -> bool:
    """Whether a page that ends there is no whole page of tokens: a state, or half full."""
    return group.kind is GroupKind.STATE or end % group.page_tokens != 0


def needed(group: GroupSpec, length: int) -> Iterator[tuple[int, Place]]:
    """(position, place) of every page that a request resuming at ``length`` needs of a group."""
    if not length:
        return
    if group.kind is GroupKind.STATE:
        yield from ((part, (length, part)) for part in range(group.slices))
        return
    size = group.page_tokens
    first = policy_of(group).active_start(length) // size
    yield from ((at, ((at + 1) * size, 0)) for at in range(first, length // size))
    if length % size:
        yield length // size, (length, 0)
