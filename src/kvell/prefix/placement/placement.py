"""Placing the pages of one holder: association by demand, eviction last.

Jenga §4.3 and §5.4 with the order corrected: a holder
gets a large page of its own only if the pages it is known to need fill it;
smaller remainders pack, best fit, into shared large pages of the group.
The literal order stays for comparison, where a layout asks for it.

Eviction goes by the keys while there is room.  Where large pages without a used page are
scarce, cached pages beside used ones go first: no other group could get them, and each large
page they save is one that any group can have.  What is young stays as far as prompts hit: it
must be, against the large page that would go, as old as the part of prompts that is hit.
"""

from collections.abc import Sequence

from kvell.pages.demand import may_take_whole
from kvell.pages.pool import KEEPERS, SHARED, PagePool
from kvell.prefix.eviction.checkpoints import Sort, Usefulness
from kvell.prefix.eviction.evictor import NORMAL, Evictor, Place
from kvell.prefix.eviction.hit_share import HitShare
from kvell.prefix.index.changes import IndexChanges
from kvell.prefix.index.radix import RadixTree

RUNGS = (
    "own_page",
    "own_large_page",
    "shared_page",
    "others_page",
    "evict_large",
    "evict_page",
    "checkpoint",
    "skip_checkpoint",
)
"""Where pages came from, in the order in which it is tried; checkpoints kept and not kept."""


SCARCE = 8
"""Large pages are scarce when fewer than one in so many has no used page."""


class Placer:
    """Carries out a demand that :func:`kvell.pages.demand.feasible` has allowed."""

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
        """Place pages of ``count`` more groups from now on."""
        self.evicted_pages.extend([0] * count)

    def place(
        self, holder: int, need: Sequence[int], demand: Sequence[int], left: list[int]
    ) -> list[list[int]]:
        """Take ``need[g]`` pages in every group g for ``holder``; returns their ids.

        ``demand[g]`` ≥ ``need[g]`` is what the holder is known to need in all from now on.
        ``left[g]``, counted down here, is what the whole call still has to place, for
        this holder and those after it: nobody takes the large page that they need.
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
        """A large page of the group with an empty page, by the first rungs of the ladder."""
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
        """Return whether a page beside used ones is taken before an empty large page is begun.

        Where large pages are scarce: the large page can serve any group, the page its own only.
        """
        if not self._is_scarce() or self._pool.has_shares:
            return False
        if self._pool.others_large(group, in_use=True) is not None:
            return True
        hole = self._evictor.oldest_page(group, in_used_large=True)
        return hole is not None and self._gives_way(group, hole[1])

    def _gives_way(self, group: int, page: int) -> bool:
        """Return whether a cached page beside used ones is old enough to go before a large page."""
        rank, time, _ = self._pool.indexed[group][page]
        large = self._evictor.oldest_large()
        if large is None or rank < NORMAL:
            return True
        now = self._evictor.now
        return self.hits.is_old(now - time, now - self._evictor.youngest(large[1])[1])

    def _in_literal_order(self, holder: int, group: int, demand: int, spare: bool) -> int | None:
        """Jenga §5.4, steps 2 to 4: a large page of its own, be it by eviction, comes first."""
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
        """Evict a large page or pages of the group, whichever the keys call for.

        A group with a share of its own evicts its own pages only.  Of a large page that
        is in use, as many go as the holder needs: it then has them side by side.
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
        """A cached page, and those beside it if its large page is in use: the oldest first.

        What is younger stays, unless it is only kept while memory is idle: beside what a window
        has left behind may lie what a later prompt resumes from.
        """
        pool, keys = self._pool, self._pool.indexed[group]
        large = page // pool.pages_per_large[group]
        if self._literal or not pool.used[large]:
            return [page]
        places = {one: self._evictor.place(keys[one]) for one in pool.cached_in(large)}
        going = [
            one
            for one, place in places.items()
            if place[0] < NORMAL or place[:-1] <= places[page][:-1]
        ]
        return sorted(going, key=lambda one: (places[one], one))

    def vacate(self, group: int, holder: int) -> int:
        """An empty large page for the holder alone; there is one, or one that may be evicted."""
        large = self._pool.claim_large(group, holder)
        if large is None and (oldest := self._evictor.oldest_large()) is not None:
            self.evict_large(oldest[1])
            large = self._pool.claim_large(group, holder)
        if large is None:
            raise AssertionError("no large page is without a used page")
        return large

    def denser(self, group: int, than: int) -> int | None:
        """A large page with an empty page and more used pages than another has, or as many and a
        lower number; None if there is none.  An old cached page may become empty for it."""
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
        """The cached pages of an evictable large page become empty, and so does it."""
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
        """Pages for something to be cached with this rank; None if there are not enough.

        Best effort: nobody who is running is in its way, and of what is cached only pages
        with places below ``limit`` give way.
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
        """Evict the large page or page of the group that goes first, if below ``limit``."""
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
        """Every cached page without a user becomes empty."""
        pool = self._pool
        for large, count in enumerate(pool.cached):
            if count:
                group = pool.group[large]
                for page in list(pool.cached_in(large)):
                    self._evict(group, page)

    def evict_cached(self, group: int, page: int) -> None:
        """A cached page becomes empty."""
        self._evict(group, page)

    def _evict(self, group: int, page: int) -> None:
        sort = Sort(self._tree.tag_of(group, page))
        if sort is Sort.PROMPT_END and not self._tree.part_of(group, page):
            self._usefulness.note_wasted(sort, self._pool.indexed[group][page][0])
        self._changes.dropped(group, page, self._tree.end_of(group, page) or 0)
        self._tree.drop(group, page)
        self._pool.evict(group, page)
        self.evicted_pages[group] += 1

    def _count(self, rung: str, large: int) -> int:
        self.rungs[rung] += 1
        return large
