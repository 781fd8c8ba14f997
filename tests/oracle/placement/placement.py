"""The placement of one holder's pages: association by demand, eviction last.

Jenga §4.3 and §5.4 with the order corrected: a holder gets its own large page only if its expected
pages fill it; smaller remainders are packed, best fit, into shared large pages of the group.  The
literal order stays for comparison, for layouts that ask for it.

Eviction follows the keys while large pages are plentiful.  While large pages without a used page
are scarce, cached pages next to used ones are evicted first: no other group could get them, and
each large page that they save can serve any group.  Young pages stay as far as prompts hit: the
page's age must be at least the hit share of the age of the large page evicted otherwise.
"""

from collections.abc import Sequence

from kvell.pages.snapshot import KEEPERS, SHARED
from kvell.prefix.core.compiled import RUNGS
from tests.oracle.eviction.checkpoints import Sort, Usefulness
from tests.oracle.eviction.evictor import NORMAL, Evictor, Place
from tests.oracle.eviction.hit_share import HitShare
from tests.oracle.index.changes import IndexChanges
from tests.oracle.index.radix import RadixTree
from tests.oracle.pages.demand import may_take_whole
from tests.oracle.pages.pool import PagePool

SCARCE = 8
"""Large pages are scarce when less than 1/8 of them have no used page."""


class Placer:
    """A placer of pages for demands that :func:`tests.oracle.pages.demand.feasible` has allowed."""

    def __init__(
        self,
        pool: PagePool,
        evictor: Evictor,
        trees: RadixTree,
        changes: IndexChanges,
        usefulness: Usefulness,
    ) -> None:
        self._pool = pool
        self._evictor = evictor
        self._tree = trees
        self._changes = changes
        self._usefulness = usefulness
        self.hits = HitShare()
        self._literal = pool.layout.association == "literal"
        self.evicted_pages = [0] * len(pool.pages_per_large)
        self.rungs = dict.fromkeys(RUNGS, 0)

    def add_groups(self, count: int) -> None:
        self.evicted_pages.extend([0] * count)

    def place(
        self, holder: int, need: Sequence[int], demand: Sequence[int], left: list[int]
    ) -> list[list[int]]:
        """Take ``need[g]`` pages in every group g for ``holder`` and return their numbers.

        :param demand: the pages that the holder is expected to need from now on, at least ``need``.
        :param left: the pages that the whole call still has to place, for this holder and later
            ones, counted down here.  No holder takes a large page that they need.
        """
        return [self._place_group(holder, g, n, demand[g], left) for g, n in enumerate(need)]

    def _place_group(
        self, holder: int, group: int, need: int, demand: int, left: list[int]
    ) -> list[int]:
        pages: list[int] = []
        while len(pages) < need:
            large = self._find_large(holder, group, left, demand)
            if large is None:
                self._make_room(group, left, demand, need - len(pages))
                continue
            while len(pages) < need and self._pool.empty_mask[large]:
                pages.append(self._pool.take(large))
                left[group] -= 1
                demand -= 1
        return pages

    def _find_large(self, holder: int, group: int, left: list[int], demand: int) -> int | None:
        """Return a large page of the group with an empty page, without an eviction, or None."""
        pool = self._pool
        spare = may_take_whole(group, left, pool.supply)
        if (own := pool.own_large(group, holder, in_use=not spare)) is not None:
            return self._count("own_page", own)
        if self._literal:
            return self._in_literal_order(holder, group, demand, spare)
        fills = demand >= pool.pages_per_large[group]
        if fills and spare and (large := pool.claim_large(group, holder)) is not None:
            return self._count("own_large_page", large)
        saves = spare and self._saves_large(group)
        if (shared := pool.shared_large(group, demand, in_use=not spare)) is not None:
            return self._count("shared_page", shared)
        begins = spare and not saves
        if begins and (large := pool.claim_large(group, SHARED)) is not None:
            return self._count("shared_page", large)
        if (others := pool.others_large(group, in_use=not begins)) is not None:
            return self._count("others_page", others)
        return None

    def _saves_large(self, group: int) -> bool:
        """Return whether to take a page next to used ones before an empty large page.

        It is while large pages are scarce: a large page can serve any group, a page only its own.
        """
        if not self._is_scarce() or self._pool.has_shares:
            return False
        if self._pool.others_large(group, in_use=True) is not None:
            return True
        hole = self._evictor.oldest_page(group, in_used_large=True)
        return hole is not None and self._gives_way(group, hole[1])

    def _gives_way(self, group: int, page: int) -> bool:
        """Return whether a cached page next to used ones is evicted before a large page."""
        rank, time, _ = self._pool.indexed[group][page]
        large = self._evictor.oldest_large()
        if large is None or rank < NORMAL:
            return True
        now = self._evictor.now
        return self.hits.is_old(now - time, now - self._evictor.youngest(large[1])[1])

    def _in_literal_order(self, holder: int, group: int, demand: int, spare: bool) -> int | None:
        """Follow Jenga §5.4, steps 2 to 4: prefer an own large page, even after an eviction."""
        pool = self._pool
        if spare and (large := pool.claim_large(group, holder)) is not None:
            return self._count("own_large_page", large)
        if spare and self._evictor.oldest_large() is not None:
            return None
        if (shared := pool.shared_large(group, demand, in_use=not spare)) is not None:
            return self._count("shared_page", shared)
        if (others := pool.others_large(group, in_use=not spare)) is not None:
            return self._count("others_page", others)
        return None

    def _make_room(self, group: int, left: Sequence[int], demand: int, need: int) -> None:
        """Evict a large page or pages of the group, as the keys decide.

        A group with a share evicts only its own pages.  In a used large page, up to as many pages
        are evicted as the holder needs, so that its pages are adjacent.
        """
        may_whole = may_take_whole(group, left, self._pool.supply)
        takes_any = may_whole and not self._pool.has_shares
        large = self._evictor.oldest_large() if takes_any else None
        page = self._evictor.oldest_page(group, in_used_large=not may_whole)
        hole = self._evictor.oldest_page(group, in_used_large=True) if self._is_scarce() else None
        if hole is not None and self._gives_way(group, hole[1]):
            large, page = None, hole
        fills = self._literal or demand >= self._pool.pages_per_large[group]
        if large is not None and (fills or page is None or large[0] < page[0]):
            self.evict_large(large[1])
        elif page is not None:
            for victim in self._beside(group, page[1])[:need]:
                self._evict_page(group, victim)
        else:
            raise AssertionError("placement was asked for an infeasible demand")

    def _beside(self, group: int, page: int) -> list[int]:
        """Return a cached page and, if its large page is used, the cached pages next to it.

        The oldest is first.  Younger pages stay, since a later prompt may resume from them, unless
        they are kept only while memory is idle.
        """
        pool, keys = self._pool, self._pool.indexed[group]
        large = page // pool.pages_per_large[group]
        if self._literal or not pool.used[large]:
            return [page]
        places = {cached: self._evictor.place(keys[cached]) for cached in pool.cached_in(large)}
        going = [
            cached
            for cached, place in places.items()
            if place[0] < NORMAL or place[:-1] <= places[page][:-1]
        ]
        return sorted(going, key=lambda cached: (places[cached], cached))

    def vacate(self, group: int, holder: int) -> int:
        """Return an empty large page for the holder alone, evicting one if there is none."""
        large = self._pool.claim_large(group, holder)
        if large is None and (oldest := self._evictor.oldest_large()) is not None:
            self.evict_large(oldest[1])
            large = self._pool.claim_large(group, holder)
        if large is None:
            raise AssertionError("no large page is without a used page")
        return large

    def denser(self, group: int, than: int) -> int | None:
        """Return a large page with an empty page and more used pages than ``than``, or as many and
        a lower number; None if there is none.  The call may evict an old cached page from it."""
        pool = self._pool

        def is_denser(large: int) -> bool:
            return (pool.used[large], -large) > (pool.used[than], -than)

        rooms = (pool.shared_large(group, 1, in_use=True), pool.others_large(group, in_use=True))
        for large in rooms:
            if large is not None and is_denser(large):
                return large
        hole = self._evictor.oldest_page(group, in_used_large=True)
        if hole is None or not is_denser(hole[1] // pool.pages_per_large[group]):
            return None
        self._evict_page(group, hole[1])
        return hole[1] // pool.pages_per_large[group]

    def evict_large(self, large: int) -> None:
        self.rungs["evict_large"] += 1
        group = self._pool.group[large]
        for page in list(self._pool.cached_in(large)):
            self._evict(group, page)

    def _evict_page(self, group: int, page: int) -> None:
        self.rungs["evict_page"] += 1
        self._evict(group, page)

    def _is_scarce(self) -> bool:
        pool = self._pool
        return not self._literal and pool.supply.whole * SCARCE < pool.layout.num_large_pages

    def keep(self, group: int, count: int, rank: int, limit: Place) -> list[int] | None:
        """Return pages for content to cache with this rank, or None if there are too few.

        Best effort: no running request is affected, and only cached pages with places below
        ``limit`` are evicted.
        """
        pages: list[int] = []
        while len(pages) < count:
            large = self._find_kept(group, count - len(pages), KEEPERS[rank])
            if large is None and self._displace(group, limit):
                continue
            if large is None:
                for page in pages:
                    self._pool.release(group, page, None)
                self.rungs["skip_checkpoint"] += 1
                return None
            pages.append(self._pool.take(large))
        self.rungs["checkpoint"] += 1
        return pages

    def _find_kept(self, group: int, count: int, keeper: int) -> int | None:
        pool = self._pool
        if (own := pool.own_large(group, keeper, in_use=False)) is not None:
            return own
        if (claimed := pool.claim_large(group, keeper)) is not None:
            return claimed
        if (shared := pool.shared_large(group, count, in_use=False)) is not None:
            return shared
        return pool.others_large(group, in_use=False)

    def _displace(self, group: int, limit: Place) -> bool:
        """Evict the first large page or page of the group, if its place is below ``limit``."""
        large = None if self._pool.has_shares else self._evictor.oldest_large()
        page = self._evictor.oldest_page(group, in_used_large=False)
        if large is not None and large[0] < limit and (page is None or large[0] <= page[0]):
            self.evict_large(large[1])
        elif page is not None and page[0] < limit:
            self._evict_page(group, page[1])
        else:
            return False
        return True

    def evict_unused(self) -> None:
        pool = self._pool
        for large, count in enumerate(pool.cached):
            if count:
                group = pool.group[large]
                for page in list(pool.cached_in(large)):
                    self._evict(group, page)

    def evict_cached(self, group: int, page: int) -> None:
        self._evict(group, page)

    def _evict(self, group: int, page: int) -> None:
        sort = Sort(self._tree.tag_of(group, page))
        if sort is Sort.PROMPT_END and not self._tree.part_of(group, page):
            self._usefulness.note_wasted(sort, self._pool.indexed[group][page][0])
        self._changes.on_dropped(group, page, self._tree.end_of(group, page) or 0)
        self._tree.drop(group, page)
        self._pool.evict(group, page)
        self.evicted_pages[group] += 1

    def _count(self, rung: str, large: int) -> int:
        self.rungs[rung] += 1
        return large
