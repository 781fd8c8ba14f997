"""The eviction order of cached pages, balanced and aligned over groups (Jenga §5.1).

A rule derives every cached page's key from its last access.  The key of a token is the same in
every group, so groups lose tokens of the same age (balanced), and of one age the longest prefix
first (aligned).  Pages kept only while memory is idle have a lower rank and are evicted first:
pages before a window, and states at fine and coarse cuts (the coarse ones later).  A large page is
as young as its youngest page (Jenga §5.4).

Only the rule chooses victims: the pool keeps keys; heaps and placer compare *places*.  A rule may
put keys into classes whose order against each other changes with time; within one class the
smallest key is always evicted first, so there is a heap for each class.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.pages.snapshot import Key
from kvell.prefix.tokens import Tokens
from tests.oracle.eviction.hazard import Run
from tests.oracle.pages.pool import PagePool

Place = tuple[float, ...]
"""The current eviction order of a cached page, smallest first; the last number only separates pages
of one age and worth."""

SPARE = 0
COARSE = 1
NORMAL = 2


@dataclass(frozen=True)
class Ending:
    """The facts about a request, besides its pages, when it ends.

    :ivar tokens: the computed tokens, int32.
    :ivar will_return: the client's hint whether the conversation continues; None for no hint.
    """

    tokens: Tokens
    root: str
    output_tokens: int
    will_return: bool | None


class EvictionRule(Protocol):
    """A rule that turns a page's last access into its place in the eviction order."""

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        """Return the key of an access at step ``time``; in one class the smallest is evicted first.

        A page with several accesses keeps the largest of their keys.

        :param rank: ``SPARE``, ``COARSE`` or ``NORMAL``.
        :param prefix_length: tokens up to the page's end, as its group's policy ranks them.
        :param eviction_class: from :meth:`on_access` or :meth:`class_before`.
        """
        ...

    def eviction_class(self, key: Key) -> int: ...

    def place(self, key: Key, now: int) -> Place:
        """Return the place of a page with this key at step ``now``."""
        ...

    def limit(self, rank: int, now: int) -> Place:
        """Return the place below which pages may be evicted for a page kept now with this rank."""
        ...

    def class_before(
        self, expected_output_tokens: int, will_return: bool | None, *, is_running: bool
    ) -> int:
        """Return the class of the pages that a request releases before its end is known.

        :param is_running: the request accesses them again, while it runs and when it ends.
        """
        ...

    def ended_at(self, now: int, expected: int) -> int:
        """Return the access time of a request that ends now and was expected to end at
        ``expected``."""
        ...

    def on_access(self, ending: Ending, now: int) -> Sequence[Run]:
        """Record a request that ends at step ``now`` and return the classes of its prefixes, by
        their length in tokens."""
        ...


def class_at(runs: Sequence[Run], token: int, otherwise: int) -> int:
    """Return the class of the prefix that ends at ``token``; after the last run, its class."""
    match = next((run for run in runs if token <= run.end), runs[-1] if runs else None)
    return otherwise if match is None else match.eviction_class


class LeastRecentlyUsed:
    """The order by rank, then oldest access, then longest prefix; one class for all."""

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        """Return the key that orders by rank, access time and longest prefix."""
        return (rank, time, -prefix_length)

    def eviction_class(self, key: Key) -> int:
        return 0

    def place(self, key: Key, now: int) -> Place:
        """Return the key: places do not change with time."""
        return key

    def limit(self, rank: int, now: int) -> Place:
        """Return the place that lets pages of this rank go if they were accessed before now."""
        return (rank, now)

    def class_before(
        self, expected_output_tokens: int, will_return: bool | None, *, is_running: bool
    ) -> int:
        return 0

    def ended_at(self, now: int, expected: int) -> int:
        """Return ``now``: pages renewed up to the expected end keep that time."""
        return now

    def on_access(self, ending: Ending, now: int) -> Sequence[Run]:
        """Return no runs: nothing is learned."""
        return ()


_Heaps = defaultdict[int, list[tuple[Key, int]]]


class Evictor:
    """A search for the page or large page with the smallest place; one heap per class.

    Stale heap entries are dropped when they reach the head.

    :ivar now: the current step; the owner of the evictor sets it.
    """

    def __init__(self, num_groups: int, rule: EvictionRule | None = None) -> None:
        self.now = 0
        self._rule = rule or LeastRecentlyUsed()
        self._pages: list[_Heaps] = [defaultdict(list) for _ in range(num_groups)]
        self._large: _Heaps = defaultdict(list)
        self._pool: PagePool | None = None

    def add_groups(self, count: int) -> None:
        self._pages.extend(defaultdict(list) for _ in range(count))

    def watch(self, pool: PagePool) -> None:
        """Set the pool; the builder of both calls this once."""
        self._pool = pool

    def on_cached(self, group: int, page: int, key: Key) -> None:
        """Record that a page lost its last user."""
        heapq.heappush(self._pages[group][self._rule.eviction_class(key)], (key, page))

    def evictable(self, large: int) -> None:
        """Record that a large page lost its last user."""
        self._push_large(self.youngest(large), large)

    def place(self, key: Key) -> Place:
        """Return the current place of a page with this key."""
        return self._rule.place(key, self.now)

    def oldest_page(self, group: int, *, in_used_large: bool) -> tuple[Place, int] | None:
        """Return the page of ``group`` to evict first; with ``in_used_large``, only from large
        pages in use."""
        heaps = list(self._pages[group].values())
        entries = [self._oldest_of(heap, group, in_used_large) for heap in heaps]
        victims = [(self.place(entry[0]), entry[1]) for entry in entries if entry]
        return min(victims, default=None)

    def _oldest_of(
        self, heap: list[tuple[Key, int]], group: int, in_used_large: bool
    ) -> tuple[Key, int] | None:
        pool, aside, oldest = self._require_pool(), [], None
        while heap:
            entry = heap[0]
            if not self._is_current(group, entry):
                heapq.heappop(heap)
                continue
            if in_used_large and not pool.used[entry[1] // pool.pages_per_large[group]]:
                aside.append(heapq.heappop(heap))
                continue
            oldest = entry
            break
        for entry in aside:
            heapq.heappush(heap, entry)
        return oldest

    def oldest_large(self) -> tuple[Place, int] | None:
        """Return the evictable large page to evict first."""
        for heap in list(self._large.values()):
            self._freshen(heap)
        heads = [heap[0] for heap in self._large.values() if heap]
        return min(((self.place(key), large) for key, large in heads), default=None)

    def _freshen(self, heap: list[tuple[Key, int]]) -> None:
        """Drop or move stale entries until the head of a class's heap is current. Entries may move
        between heaps."""
        pool = self._require_pool()
        while heap:
            key, large = heap[0]
            if pool.used[large] or not pool.cached[large]:
                heapq.heappop(heap)
                continue
            youngest = self.youngest(large)
            if key == youngest:
                return
            heapq.heappop(heap)
            self._push_large(youngest, large)

    def _push_large(self, key: Key, large: int) -> None:
        heapq.heappush(self._large[self._rule.eviction_class(key)], (key, large))

    def youngest(self, large: int) -> Key:
        """Return the key of an evictable large page: that of its page that is evicted last."""
        pool = self._require_pool()
        indexed = pool.indexed[pool.group[large]]
        return max((indexed[page] for page in pool.cached_in(large)), key=self.place)

    def _is_current(self, group: int, entry: tuple[Key, int]) -> bool:
        pool = self._require_pool()
        page_key, page = entry
        return not pool.is_used(group, page) and pool.indexed[group].get(page) == page_key

    def _require_pool(self) -> PagePool:
        if self._pool is None:
            raise RuntimeError("the evictor watches no pool yet")
        return self._pool
