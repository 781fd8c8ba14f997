"""Which cached page goes first: balanced and aligned over groups (Jenga §5.1).

Every cached page has a key that a rule makes of its last access, the same for the
same token in every group: so groups lose tokens of the same age (balanced), and of
one age the longest prefix first (aligned).  What is kept only while memory is idle has a
lower rank: pages that a window left behind, and states on the way (a few of them above
the others); they go before anything that ends a resumable prefix.  A large page is as
young as its youngest page (Jenga §5.4).

The rule is the only part that knows what makes a good victim: pool, heaps and placer
compare keys.
"""

import heapq
from typing import Protocol

from kvell.pages.pool import Key, PagePool

SPARE = 0
COARSE = 1
NORMAL = 2


class EvictionRule(Protocol):
    """What an access makes of a page's place in the eviction order."""

    def key(self, rank: int, time: int, prefix_length: int) -> Key:
        """Place of a page accessed at step ``time``; the smallest goes first.

        :param rank: ``SPARE``, ``COARSE`` or ``NORMAL``.
        :param prefix_length: tokens up to the page's end, as its group's policy ranks them.

        A page of several accesses keeps the largest of their keys.
        """
        ...


class LeastRecentlyUsed:
    """By rank, then the oldest access, then the longest prefix."""

    def key(self, rank: int, time: int, prefix_length: int) -> Key:
        """See :class:`EvictionRule`."""
        return (rank, time, -prefix_length)


class Evictor:
    """Finds the smallest key, with heaps whose stale entries are dropped when met."""

    def __init__(self, num_groups: int) -> None:
        self._pages: list[list[tuple[Key, int]]] = [[] for _ in range(num_groups)]
        self._large: list[tuple[Key, int]] = []
        self._pool: PagePool | None = None

    def add_groups(self, count: int) -> None:
        """Serve ``count`` more groups from now on."""
        self._pages.extend([] for _ in range(count))

    def watch(self, pool: PagePool) -> None:
        """Serve this pool; called once, by whoever builds both."""
        self._pool = pool

    def cached(self, group: int, page: int, key: Key) -> None:
        """A page lost its last user."""
        heapq.heappush(self._pages[group], (key, page))

    def evictable(self, large: int) -> None:
        """A large page lost its last user."""
        heapq.heappush(self._large, (self.youngest(large), large))

    def oldest_page(self, group: int, *, in_used_large: bool) -> tuple[Key, int] | None:
        """The page of ``group`` to evict first, maybe only of large pages in use."""
        heap, pool = self._pages[group], self._require_pool()
        aside, found = [], None
        while heap:
            entry = heap[0]
            if not self._is_current(group, entry):
                heapq.heappop(heap)
                continue
            if in_used_large and not pool.used[entry[1] // pool.pages_per_large[group]]:
                aside.append(heapq.heappop(heap))
                continue
            found = entry
            break
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def oldest_large(self) -> tuple[Key, int] | None:
        """The evictable large page to evict first."""
        pool = self._require_pool()
        while self._large:
            entry = self._large[0]
            large = entry[1]
            if not pool.used[large] and pool.cached[large]:
                youngest = self.youngest(large)
                if entry[0] == youngest:
                    return entry
                heapq.heapreplace(self._large, (youngest, large))
            else:
                heapq.heappop(self._large)
        return None

    def youngest(self, large: int) -> Key:
        """Place of an evictable large page in the eviction order: its youngest page's."""
        pool = self._require_pool()
        indexed = pool.indexed[pool.group[large]]
        return max(indexed[page] for page in pool.cached_in(large))

    def _is_current(self, group: int, entry: tuple[Key, int]) -> bool:
        pool = self._require_pool()
        page_key, page = entry
        return not pool.is_used(group, page) and pool.indexed[group].get(page) == page_key

    def _require_pool(self) -> PagePool:
        if self._pool is None:
            raise RuntimeError("the evictor watches no pool yet")
        return self._pool
