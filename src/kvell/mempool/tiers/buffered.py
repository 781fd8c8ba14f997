"""Pages of texts in host memory, with the same names as in the pool's index.

A page's key has its group, the digest of all tokens up to its end, and the part that distinguishes
pages with the same end: the path and place of the radix index.  So texts with a common prefix share
pages, and a partly filled page, or a state, matches only where its text ended.  Pages are dropped
in least recently used order; within a text, from its end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvell.elastic.page_buffer import PageBuffer
from kvell.memory import GroupKind, GroupSpec, policy_of
from kvell.mempool.tiers.digests import Digest, PrefixDigests
from kvell.vocabulary import PageId

FIRST_HOLDER = 1 << 40
"""The first holder id used here; those of preempted requests are lower."""

Place = tuple[int, int]
"""The (end, part) of a page: tokens of the prefix that it ends, and its index among pages there."""
Key = tuple[int, Digest, int]
"""The (group, digest of all tokens up to the page's end, part) of a page."""


@dataclass
class _Page:
    """A page of the buffer.

    :param used: the last plan that copied it.
    """

    holder: int
    page: PageId
    end: int
    used: int


@dataclass(frozen=True)
class KeptPages:
    """The keys and holders of pages that another instance reads."""

    pages: tuple[tuple[Key, int], ...]


class BufferedPages:
    """An index of the buffer's pages that hold texts."""

    def __init__(self, groups: Sequence[GroupSpec], buffer: PageBuffer) -> None:
        self.groups = groups
        self._buffer = buffer
        self._pages: OrderedDict[Key, _Page] = OrderedDict()  # least recently used first
        self._ends: Counter[int] = Counter()
        self.pins: Counter[Key] = Counter()
        self._reserved: dict[int, PageId] = {}  # pages without a text, by holder
        self._next_holder = FIRST_HOLDER
        self._plan = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def begin(self) -> None:
        """Begin a plan. Pages that the plan copies stay until it has run."""
        self._plan += 1

    def ends(self) -> list[int]:
        """Return the ends of states and partly filled pages of all texts, in tokens."""
        return list(self._ends)

    # ------------------------------------------------------------------------- changes

    def put(self, group: int, place: Place, digests: PrefixDigests) -> PageId | None:
        reserved = self.reserve(group)
        if reserved is None:
            return None
        holder, page = reserved
        self.publish(key(group, place, digests), place[0], holder)
        return page

    def reserve(self, group: int) -> tuple[int, PageId] | None:
        """Allocate a page that no text has yet; drop others for it, as needed.

        :returns: its holder, and its number in the buffer; None if there is no room.
        """
        need = [0] * len(self.groups)
        need[group] = 1
        self.make_room(need)
        pages = self._buffer.hold(self._next_holder, need)
        if pages is None:
            return None
        self._next_holder += 1
        [page] = pages[group]
        self._reserved[self._next_holder - 1] = page
        return self._next_holder - 1, page

    def publish(self, page_key: Key, end: int, holder: int) -> None:
        """Give a reserved page, which has been written, to the texts that it belongs to.

        Its place is free again if another page has the key by now.
        """
        page = self._reserved.pop(holder)
        if not self._buffer.is_held(holder):
            return  # all was cleared
        if page_key in self._pages:
            self._buffer.drop(holder)
            return
        self._pages[page_key] = _Page(holder, page, end, self._plan)
        if is_mark(self.groups[page_key[0]], end):
            self._ends[end] += 1

    def give_back(self, holder: int) -> None:
        """Free a reserved page; idempotent."""
        if self._reserved.pop(holder, None) is not None:
            self._buffer.drop(holder)

    def page(self, key: Key) -> PageId:
        """Return the buffer's page of a key.

        :raises KeyError: if there is none.
        """
        return self._pages[key].page

    def touch(self, keys: Iterable[Key]) -> None:
        for page_key in keys:
            if page_key in self._pages:
                self._pages.move_to_end(page_key)
                self._pages[page_key].used = self._plan

    def unpin(self, keys: Iterable[Key]) -> None:
        self.pins.subtract(keys)
        self.pins = +self.pins

    def begin_read(self, keys: Iterable[Key]) -> "KeptPages":
        """Keep pages for another instance, which reads them, until :meth:`end_read`."""
        read = KeptPages(tuple((page_key, self._pages[page_key].holder) for page_key in keys))
        self.pins.update(page_key for page_key, _ in read.pages)
        for _, holder in read.pages:
            self._buffer.begin_read(holder)
        return read

    def end_read(self, read: "KeptPages") -> None:
        self.unpin(page_key for page_key, _ in read.pages)
        for _, holder in read.pages:
            self._buffer.end_read(holder)

    def make_room(self, need: Sequence[int]) -> None:
        """Drop pages until ``need`` pages of each group fit, or no more can be dropped."""
        while not self._buffer.has_room(need):
            page_key = next(
                (page_key for page_key in self._pages if page_key not in self.pins), None
            )
            if page_key is None or self._pages[page_key].used == self._plan:
                return
            self._drop(page_key)

    def forget(self, keys: Iterable[Key]) -> int:
        """Drop stored pages that are not pinned, and return their number."""
        going = [
            page_key for page_key in keys if page_key in self._pages and page_key not in self.pins
        ]
        for page_key in going:
            self._drop(page_key)
        return len(going)

    def clear(self) -> None:
        for page_key in list(self._pages):
            self._drop(page_key)

    def _drop(self, page_key: Key) -> None:
        gone = self._pages.pop(page_key)
        self._buffer.drop(gone.holder)
        if is_mark(self.groups[page_key[0]], gone.end):
            self._ends[gone.end] -= 1
            self._ends = +self._ends


def key(group: int, place: Place, digests: PrefixDigests) -> Key:
    return group, digests.of(place[0]), place[1]


def is_mark(group: GroupSpec, end: int) -> bool:
    """Return whether a page that ends there is a state or a partly filled page."""
    return group.kind is GroupKind.STATE or end % group.page_tokens != 0


def needed_pages(group: GroupSpec, length: int) -> Iterator[tuple[int, Place]]:
    """Yield (position, place) of every page of a group that is needed to resume at ``length``."""
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
