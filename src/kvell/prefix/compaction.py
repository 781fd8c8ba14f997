"""Gathering a request's scattered pages into large pages of its own.

A request that outlives what was expected of it gets page after page in holes of other
requests' large pages.  When those requests end, what they leave there is stranded: no
other group can get it.  So while there are large pages to spare, pages that lie in sparse
ones are moved, a large page at a time, into one that the request then has alone.  The
paper keeps a request's pages together only when it takes them (Jenga §4.3).
"""

from collections.abc import Iterator, Sequence

from kvell.prefix.holders import GroupPages, Holder
from kvell.prefix.store import Store

SPREAD = 64
"""Worth looking when at least one byte in so many is in a used large page, yet not used."""
SPARE_LARGE = 16
"""Only while one large page in so many has no used page."""
SPARSE = 2
"""A large page is sparse when at most one page in so many is used."""
SCAN_PAGES = 4096
"""Pages looked at in one call, at most (and what one group of one request has above them)."""


class Compactor:
    """Goes round the requests, a few at each call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0

    def compact(
        self, holders: Sequence[Holder], most_large: int
    ) -> Iterator[tuple[Holder, int, int, int, int]]:
        """Move pages; yields (holder, group, position, old page, new page) for each.

        The old page is the holder's until it is copied: among its ``sources``.

        :param holders: by handle.
        """
        if not self._is_worth_it():
            return
        ahead = [h for h in holders if h.handle > self._last]
        scanned = 0
        for holder in [*ahead, *(h for h in holders if h.handle <= self._last)]:
            if scanned >= SCAN_PAGES or most_large <= 0:
                return
            self._last = holder.handle
            if holder.lease_until is not None or any(held.sources for held in holder.groups):
                continue
            for group, held in holder.own_groups():
                scanned += len(held.pages)
                positions = self._scattered(group, held)
                if positions and most_large > 0 and self._is_spare():
                    most_large -= 1
                    large = self._store.placer.vacate(group, holder.handle)
                    yield from self._move(holder, group, held, positions, large)

    def _is_worth_it(self) -> bool:
        pool, groups = self._store.pool, self._store.groups
        if self._store.layout.association == "literal" or pool.has_shares:
            return False
        supply = pool.supply
        partial_bytes = sum(
            pages * group.page_stride_bytes
            for pages, group in zip(supply.partial, groups, strict=True)
        )
        return partial_bytes * SPREAD >= self._store.layout.pool_bytes and self._is_spare()

    def _is_spare(self) -> bool:
        whole = self._store.pool.supply.whole
        return whole > 0 and whole * SPARE_LARGE >= self._store.layout.num_large_pages

    def _scattered(self, group: int, held: GroupPages) -> list[int]:
        """Positions whose pages fill a large page, and lie in sparse ones; empty if too few."""
        pool = self._store.pool
        per_large = pool.pages_per_large[group]
        found: list[int] = []
        for position, page in enumerate(held.pages[:SCAN_PAGES], start=held.first):
            sparse = pool.used[page // per_large] * SPARSE <= per_large
            if sparse and pool.refs[group][page] == 1:
                found.append(position)
                if len(found) == per_large:
                    return found
        return []

    def _move(
        self, holder: Holder, group: int, held: GroupPages, positions: Sequence[int], large: int
    ) -> Iterator[tuple[Holder, int, int, int, int]]:
        pool = self._store.pool
        for position in positions:
            old, new = held.pages[position - held.first], pool.take(large)
            if pool.rename(group, old, new):
                self._store.tree.rename(group, old, new)
            held.pages[position - held.first] = new
            held.sources[position] = ((0, 0), old)
            yield holder, group, position, old, new
