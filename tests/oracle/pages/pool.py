"""The pool of large pages, carved into the small pages of layer groups.

One machine, two levels. A small page::

            take                 release, not indexed
    EMPTY ────────► USED ──────────────────────────────► EMPTY
      ▲              │ ▲
      │ evict        │ │ acquire (a hit)
      │              ▼ │
      └─────────── CACHED        release, indexed

A large page belongs to no group while all of it is empty (``group == NO_GROUP``); then it may be
*withheld* (activations have its memory, say) until it is restored. It joins a group when that group
needs a page, and is *evictable* while it holds cached pages but no used one. It may be associated
with one holder (a request or lease), which then gets its pages first (Jenga §4.3); otherwise its
pages are shared out to all holders of the group.

RESERVED (allocated, content undefined) and DRAINING (released, a fence pending) are used pages seen
through their holder: the pool counts references, and the holder defines the meaning of a reference.

Ids: page ``p`` of group g is index ``p % pages_per_large[g]`` of logical large page
``p // pages_per_large[g]``.
"""

import heapq
from collections.abc import Iterator
from typing import Protocol

from kvell.pages.layout import Layout
from kvell.pages.snapshot import KEEPERS, NO_GROUP, SHARED, Key
from tests.oracle.pages.demand import Supply


class CachedPages(Protocol):
    """The evictor, notified when pages become or cease to be evictable."""

    def on_cached(self, group: int, page: int, key: Key) -> None:
        """Handle a page that lost its last user and is kept."""
        ...

    def evictable(self, large: int) -> None:
        """Handle a large page without a used page that caches pages, maybe fewer than before."""
        ...


class PagePool:
    """Reference counts of pages, without knowledge of tokens, requests or torch."""

    def __init__(self, layout: Layout, observer: CachedPages) -> None:
        self.layout = layout
        self.pages_per_large = tuple(g.pages_per_large for g in layout.groups)
        count = layout.num_large_pages
        self.group = [NO_GROUP] * count
        self.owner = [SHARED] * count
        self.used = [0] * count
        self.cached = [0] * count
        self.empty_mask = [0] * count
        self.written = [0] * count  # its first pages, used at least once
        self.refs: list[dict[int, int]] = [{} for _ in layout.groups]
        self.indexed: list[dict[int, Key]] = [{} for _ in layout.groups]
        self._observer = observer
        self._empty_heap = list(range(count))
        self._whole = count
        self._quota = layout.quota_large_pages
        if self._quota is not None and sum(self._quota) > count:
            raise ValueError(f"shares of {sum(self._quota)} large pages in a pool of {count}")
        self._claimed = [0] * len(layout.groups)
        self._in_use = [0] * len(layout.groups)
        self._partial = [0] * len(layout.groups)
        self._live: set[int] = set(KEEPERS)
        self.withheld: set[int] = set()
        # Large pages of each group that have an empty page, shared and associated.
        self._shared: list[set[int]] = [set() for _ in layout.groups]
        self._owned: list[set[int]] = [set() for _ in layout.groups]

    def add_groups(self, layout: Layout) -> None:
        """Serve a layout with more groups, which follow the present ones."""
        count = len(layout.groups) - len(self.layout.groups)
        self.layout = layout
        self.pages_per_large = tuple(g.pages_per_large for g in layout.groups)
        for numbers in (self._claimed, self._in_use, self._partial):
            numbers.extend([0] * count)
        self.refs.extend({} for _ in range(count))
        self.indexed.extend({} for _ in range(count))
        self._shared.extend(set() for _ in range(count))
        self._owned.extend(set() for _ in range(count))

    @property
    def supply(self) -> Supply:
        """The pages that could be handed out now, evictable pages included."""
        return Supply(self._whole, tuple(self._partial), self.pages_per_large, self._shares())

    @property
    def has_shares(self) -> bool:
        """Whether each group may use only its share of large pages."""
        return self._quota is not None

    @property
    def num_empty_large(self) -> int:
        """The number of large pages that belong to no group."""
        return len(self._empty_heap)

    def num_empty(self, large: int) -> int:
        """Return the number of empty small pages of a large page that belongs to a group."""
        return self.empty_mask[large].bit_count()

    def is_used(self, group: int, page: int) -> bool:
        return page in self.refs[group]

    def open_holder(self, holder: int) -> None:
        self._live.add(holder)

    def close_holder(self, holder: int) -> None:
        """Share the large pages that were associated with a closed holder."""
        self._live.discard(holder)
        for group, owned in enumerate(self._owned):
            mine = [large for large in owned if self.owner[large] == holder]
            for large in mine:
                owned.discard(large)
                self.owner[large] = SHARED
                self._shared[group].add(large)

    # With ``in_use`` only large pages that have a used page are picked: taking a
    # page of another makes one whole large page less for all groups.

    def own_large(self, group: int, holder: int, *, in_use: bool) -> int | None:
        """Return the lowest large page with an empty page that is associated with the holder."""
        owned = self._usable(self._owned[group], in_use)
        return min((large for large in owned if self.owner[large] == holder), default=None)

    def shared_large(self, group: int, want: int, *, in_use: bool) -> int | None:
        """Return the shared large page that ``want`` pages fit best; else the emptiest."""
        shared = self._usable(self._shared[group], in_use)
        by_room = sorted((self.num_empty(large), large) for large in shared)
        fitting = next((large for room, large in by_room if room >= want), None)
        if fitting is not None or not by_room:
            return fitting
        room = by_room[-1][0]
        return next(large for count, large in by_room if count == room)

    def others_large(self, group: int, *, in_use: bool) -> int | None:
        """Return a large page with an empty page, associated with the youngest other holder."""
        owned = self._usable(self._owned[group], in_use)
        return max(owned, key=lambda large: (self.owner[large], large), default=None)

    def claim_large(self, group: int, holder: int) -> int | None:
        """Take the lowest empty large page into ``group``; return None if there is none for it."""
        if not self._empty_heap:
            return None
        if self._quota is not None and self._claimed[group] >= self._quota[group]:
            return None
        large = heapq.heappop(self._empty_heap)
        self._claimed[group] += 1
        self.group[large] = group
        self.owner[large] = holder
        self.empty_mask[large] = (1 << self.pages_per_large[group]) - 1
        self._list_if_empty(large)
        return large

    def withhold(self, large: int) -> None:
        self._empty_heap.remove(large)
        heapq.heapify(self._empty_heap)
        self._whole -= 1
        self.withheld.add(large)

    def restore(self, large: int) -> None:
        self.withheld.remove(large)
        heapq.heappush(self._empty_heap, large)
        self._whole += 1

    def take(self, large: int) -> int:
        """Use the lowest empty page of a large page that has one; return its id."""
        group = self.group[large]
        mask = self.empty_mask[large]
        index = (mask & -mask).bit_length() - 1
        page = large * self.pages_per_large[group] + index
        self._uncount(large)
        self.empty_mask[large] = mask & (mask - 1)
        self.used[large] += 1
        self.written[large] = max(self.written[large], index + 1)
        self.refs[group][page] = 1
        self._count(large)
        if not self.empty_mask[large]:
            self._unlist(large)
        return page

    def acquire(self, group: int, page: int) -> None:
        refs = self.refs[group]
        if page in refs:
            refs[page] += 1
            return
        large = page // self.pages_per_large[group]
        self._uncount(large)
        self.cached[large] -= 1
        self.used[large] += 1
        refs[page] = 1
        self._count(large)

    def release(self, group: int, page: int, key: Key | None) -> None:
        """Remove a user; the last one leaves the page cached if indexed, else empty.

        ``key`` is its new place in the eviction order; None keeps the old one (an unused lease
        renews nothing).
        """
        refs = self.refs[group]
        if key is not None and page in self.indexed[group]:
            self.indexed[group][page] = max(key, self.indexed[group][page])
        if refs[page] > 1:
            refs[page] -= 1
            return
        del refs[page]
        large = page // self.pages_per_large[group]
        self._uncount(large)
        self.used[large] -= 1
        if page in self.indexed[group]:
            self.cached[large] += 1
            self._observer.on_cached(group, page, self.indexed[group][page])
        else:
            self._make_empty(group, page)
        self._settle(large)

    def index(self, group: int, page: int, key: Key) -> None:
        """Mark a used page as named by the prefix index."""
        self.indexed[group][page] = key

    def rename(self, group: int, old: int, new: int) -> bool:
        """Move an index entry from page ``old`` to ``new``; return whether ``old`` had one."""
        key = self.indexed[group].pop(old, None)
        if key is not None:
            self.indexed[group][new] = key
        return key is not None

    def evict(self, group: int, page: int) -> None:
        large = page // self.pages_per_large[group]
        del self.indexed[group][page]
        self._uncount(large)
        self.cached[large] -= 1
        self._make_empty(group, page)
        self._settle(large)

    def cached_in(self, large: int) -> Iterator[int]:
        group = self.group[large]
        first = large * self.pages_per_large[group]
        for page in range(first, first + self.pages_per_large[group]):
            if page in self.indexed[group] and page not in self.refs[group]:
                yield page

    def _shares(self) -> tuple[int, ...] | None:
        if self._quota is None:
            return None
        return tuple(q - used for q, used in zip(self._quota, self._in_use, strict=True))

    def _usable(self, larges: set[int], in_use: bool) -> Iterator[int]:
        return (large for large in larges if self.used[large] or not in_use)

    def _make_empty(self, group: int, page: int) -> None:
        large, index = divmod(page, self.pages_per_large[group])
        if not self.empty_mask[large] and self.owner[large] not in self._live:
            self.owner[large] = SHARED
        self.empty_mask[large] |= 1 << index
        self._list_if_empty(large)

    def _settle(self, large: int) -> None:
        """Update ``large`` after one of its pages lost its use or its cached content."""
        if not self.used[large] and not self.cached[large]:
            self._unlist(large)
            self._claimed[self.group[large]] -= 1
            self.group[large] = NO_GROUP
            self.owner[large] = SHARED
            self.empty_mask[large] = 0
            self.written[large] = 0
            heapq.heappush(self._empty_heap, large)
        self._count(large)
        if not self.used[large] and self.cached[large]:
            self._observer.evictable(large)

    def _count(self, large: int, sign: int = 1) -> None:
        if self.used[large]:
            group = self.group[large]
            self._partial[group] += sign * (self.pages_per_large[group] - self.used[large])
            self._in_use[group] += sign
        else:
            self._whole += sign

    def _uncount(self, large: int) -> None:
        self._count(large, -1)

    def _list_if_empty(self, large: int) -> None:
        lists = self._shared if self.owner[large] == SHARED else self._owned
        lists[self.group[large]].add(large)

    def _unlist(self, large: int) -> None:
        self._shared[self.group[large]].discard(large)
        self._owned[self.group[large]].discard(large)
