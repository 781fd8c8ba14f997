"""The CPU buffer as a ledger: a second pool of large pages, in host memory, and its holders.

A large page of the buffer is carved into pages of one layer group, as in the pool on the device, so
that a page is copied unchanged. A holder has all the pages that it requested, or none::

            hold                      release                 settle: a step later
     EMPTY ──────► HELD by a holder ──────────► DRAINING ─────────────────────────► EMPTY
                         └── drop: no step reads it ─────────────────────────────────┘

The step in flight may still read released pages, so they are reused only after the next one.
Pages that another instance reads (:meth:`PageBuffer.begin_read`) stay as they are until it has
read them, also without their holder.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvell.pages.layout import GroupSpec
from kvell.vocabulary import PageId

NO_GROUP = -1


@dataclass
class BufferCounts:
    """Pages and bytes so far, in each direction.

    :ivar sent_pages: pages that were offered to other instances from here.
    """

    refused: int = 0
    out_pages: int = 0
    out_bytes: int = 0
    in_pages: int = 0
    in_bytes: int = 0
    sent_pages: int = 0


class PageBuffer:
    """The pages of ``num_large`` large pages; the caller names the holders.

    :param is_far: whether a pass that reads pages here has them come over a link.
    :ivar counts: of moved pages; the caller updates them.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], num_large: int, *, is_far: bool = False
    ) -> None:
        self.groups, self.num_large, self.is_far = groups, num_large, is_far
        self.counts = BufferCounts()
        self.group_of = [NO_GROUP] * num_large
        self.empty_large = list(range(num_large - 1, -1, -1))
        self.free: list[dict[int, list[PageId]]] = [{} for _ in groups]  # by large page, some left
        self.held: dict[int, tuple[tuple[int, PageId], ...]] = {}
        self.draining: list[tuple[int, PageId]] = []
        self.readers: Counter[int] = Counter()  # by holder
        self.left: dict[int, tuple[tuple[int, PageId], ...]] = {}  # by holder: only read now

    def hold(self, holder: int, need: Sequence[int]) -> list[list[PageId]] | None:
        """Take ``need`` pages, counted for each group, or return None if they are not free.

        :raises ValueError: if the holder has some already.
        """
        if holder in self.held:
            raise ValueError(f"holder {holder} has pages in the buffer")
        if not self.has_room(need):
            self.counts.refused += 1
            return None
        pages = [self._take(group, count) for group, count in enumerate(need)]
        self.held[holder] = tuple((g, page) for g, some in enumerate(pages) for page in some)
        return pages

    def is_held(self, holder: int) -> bool:
        return holder in self.held

    def has_room(self, need: Sequence[int]) -> bool:
        """Return whether ``need`` pages, counted for each group, can be taken now."""
        return self._large_needed(need) <= len(self.empty_large)

    def release(self, holder: int) -> None:
        """Release the holder's pages after the step that is planned now; idempotent."""
        pages = self.held.pop(holder, ())
        if self.readers[holder] and pages:
            self.left[holder] = pages
        else:
            self.draining.extend(pages)

    def drop(self, holder: int) -> None:
        """Free the holder's pages immediately; idempotent.

        Neither the step in flight nor the one that is planned may read them.
        """
        if self.readers[holder]:
            self.release(holder)
            return
        for group, page in self.held.pop(holder, ()):
            self._give_back(group, page)

    def begin_read(self, holder: int) -> None:
        """Keep the holder's pages for another instance, which reads them outside of steps."""
        self.readers[holder] += 1
        self.counts.sent_pages += len(self.held[holder])

    def end_read(self, holder: int) -> None:
        """Undo :meth:`begin_read`; pages without a holder are free a step later."""
        if holder not in self.readers:
            return  # all was cleared
        self.readers[holder] -= 1
        if not self.readers[holder]:
            del self.readers[holder]
            self.draining.extend(self.left.pop(holder, ()))

    def clear(self) -> None:
        """Free all pages of all holders; no step and no other instance may read any of them."""
        self.held.clear()
        self.draining.clear()
        self.readers.clear()
        self.left.clear()
        self.group_of = [NO_GROUP] * self.num_large
        self.empty_large = list(range(self.num_large - 1, -1, -1))
        self.free = [{} for _ in self.groups]

    def settle(self) -> None:
        """Free the draining pages: the step that may have read them is complete."""
        for group, page in self.draining:
            self._give_back(group, page)
        self.draining.clear()

    def size_bytes(self, need: Sequence[int]) -> int:
        """Return the bytes of ``need`` pages, counted for each group."""
        return sum(n * g.page_stride_bytes for n, g in zip(need, self.groups, strict=True))

    @property
    def used_large(self) -> int:
        """The number of large pages with a page that is held or draining."""
        return self.num_large - len(self.empty_large)

    def figures(self) -> dict[str, int]:
        return {
            "large_pages": self.num_large,
            "used_large_pages": self.used_large,
            "holders": len(self.held),
            "held_pages": sum(map(len, self.held.values())),
            **vars(self.counts),
        }

    # ------------------------------------------------------------------------ placing

    def _large_needed(self, need: Sequence[int]) -> int:
        total = 0
        for group, count in enumerate(need):
            missing = count - sum(map(len, self.free[group].values()))
            total += max(0, -(-missing // self.groups[group].pages_per_large))
        return total

    def _take(self, group: int, count: int) -> list[PageId]:
        """Take pages of partly used large pages, the fullest first; then of empty ones."""
        free = self.free[group]
        taken = list[PageId]()
        for large in sorted(free, key=lambda large: (len(free[large]), large)):
            while free[large] and len(taken) < count:
                taken.append(free[large].pop())
            if not free[large]:
                del free[large]
        while len(taken) < count:
            large = self.empty_large.pop()
            size = self.groups[group].pages_per_large
            self.group_of[large] = group
            some = min(size, count - len(taken))
            taken.extend(map(PageId, range(large * size, large * size + some)))
            if some < size:
                left = range((large + 1) * size - 1, large * size + some - 1, -1)
                free[large] = [*map(PageId, left)]
        return taken

    def _give_back(self, group: int, page: PageId) -> None:
        size = self.groups[group].pages_per_large
        large = page // size
        free = self.free[group].setdefault(large, [])
        free.append(page)
        if len(free) == size:
            del self.free[group][large]
            self.group_of[large] = NO_GROUP
            self.empty_large.append(large)


def first_pages(groups: Sequence[GroupSpec], first_large: int) -> list[PageId]:
    """Return the numbers of each group's first page in a buffer that follows a pool."""
    return [PageId(first_large * group.pages_per_large) for group in groups]
