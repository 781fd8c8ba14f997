"""Compaction of scattered pages, into a request's own large pages or into denser ones.

A request that outgrows its expected length gets page after page in holes of other
requests' large pages.  When those requests end, their free pages are stranded: no other
group can get them.  So while there are spare large pages, pages in sparse large pages are
moved, a large page at a time, into one that the request then has alone.  While there are
none, they are moved one by one into holes of denser large pages, until sparse ones have no
used page left and any group can get them.  The paper keeps a request's pages together only
when it allocates them (Jenga §4.3).
"""

from collections.abc import Iterator, Sequence

from tests.oracle.placement.holders import GroupPages, Holder
from tests.oracle.placement.store import Store

SPREAD = 64
"""The least part of the pool, 1/64, in unused pages of used large pages for compaction to run. It
also runs when every large page has a used page."""
SPARE_LARGE = 16
"""The least part of the large pages, 1/16, that must have no used page to gather pages."""
SPARSE = 2
"""A large page is sparse when at most half of its pages are used."""
SCAN_PAGES = 4096
"""The number of scanned pages after which a call starts with no further request."""
SQUEEZED_PAGES = 64
"""The most pages moved into denser large pages in one call."""
MOST_REST = 31
"""The most calls that skip the search after one that found no page to move to a denser large page.
"""


class Compactor:
    """A compactor that visits a few requests at each call, in turn."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        self._rest = self._rests = 0

    def compact(
        self, holders: Sequence[Holder], most_large: int
    ) -> Iterator[tuple[Holder, int, int, int, int]]:
        """Move pages and yield (holder, group, position, old page, new page) for each.

        The old page stays among the holder's ``sources`` until it is copied.

        :param holders: in the order of handles.
        :param most_large: the most large pages to fill.
        """
        if not holders or not self._is_worth_it():
            return
        if self._is_spare():
            yield from self._gather(holders, most_large)
        elif self._rests > 0:
            self._rests -= 1
        else:
            moves = list(self._squeeze(holders)) if most_large > 0 else []
            self._rest = 0 if moves else min(2 * self._rest + 1, MOST_REST)
            self._rests = self._rest
            yield from moves

    def _in_turn(self, holders: Sequence[Holder]) -> Iterator[Holder]:
        """Yield the holders, starting after the last one of the previous call."""
        ahead = [h for h in holders if h.handle > self._last]
        for holder in [*ahead, *(h for h in holders if h.handle <= self._last)]:
            self._last = holder.handle
            yield holder

    def _gather(
        self, holders: Sequence[Holder], most_large: int
    ) -> Iterator[tuple[Holder, int, int, int, int]]:
        scanned = 0
        turns = self._in_turn(holders)
        while scanned < SCAN_PAGES and most_large > 0 and (holder := next(turns, None)):
            if not _may_move(holder):
                continue
            for group, held in holder.own_groups():
                scanned += len(held.pages)
                most = self._store.pool.pages_per_large[group]
                positions = self._scattered(group, held, most)
                if len(positions) == most and most_large > 0 and self._is_spare():
                    most_large -= 1
                    large = self._store.placer.vacate(group, holder.handle)
                    for position in positions:
                        yield self._move(holder, group, held, position, large)

    def _squeeze(self, holders: Sequence[Holder]) -> Iterator[tuple[Holder, int, int, int, int]]:
        scanned, left = 0, SQUEEZED_PAGES
        turns = self._in_turn(holders)
        while scanned < SCAN_PAGES and left > 0 and (holder := next(turns, None)):
            if not _may_move(holder):
                continue
            for group, held in holder.own_groups():
                scanned += len(held.pages)
                for position, large in self._denser(group, held, left):
                    left -= 1
                    yield self._move(holder, group, held, position, large)

    def _denser(self, group: int, held: GroupPages, most: int) -> Iterator[tuple[int, int]]:
        """Yield positions of pages to move, each with a denser large page with an empty page."""
        pool = self._store.pool
        per_large = pool.pages_per_large[group]
        if per_large == 1 or pool.supply.partial[group] < per_large or most <= 0:
            return
        for position in self._scattered(group, held, most):
            current = held.pages[position - held.first] // per_large
            large = self._store.placer.denser(group, current)
            if large is None:
                return
            yield position, large

    def _is_worth_it(self) -> bool:
        pool, groups = self._store.pool, self._store.groups
        if self._store.layout.association == "literal" or pool.has_shares:
            return False
        supply = pool.supply
        if supply.whole == 0:
            return True
        partial_bytes = sum(
            pages * group.page_stride_bytes
            for pages, group in zip(supply.partial, groups, strict=True)
        )
        return partial_bytes * SPREAD >= self._store.layout.pool_bytes

    def _is_spare(self) -> bool:
        whole = self._store.pool.supply.whole
        return whole > 0 and whole * SPARE_LARGE >= self._store.layout.num_large_pages

    def _scattered(self, group: int, held: GroupPages, most: int) -> list[int]:
        """Return the first positions of pages in sparse large pages, at most ``most``."""
        pool = self._store.pool
        per_large = pool.pages_per_large[group]
        positions: list[int] = []
        for position, page in enumerate(held.pages[:SCAN_PAGES], start=held.first):
            sparse = pool.used[page // per_large] * SPARSE <= per_large
            if sparse and pool.refs[group][page] == 1:
                positions.append(position)
                if len(positions) == most:
                    break
        return positions

    def _move(
        self, holder: Holder, group: int, held: GroupPages, position: int, large: int
    ) -> tuple[Holder, int, int, int, int]:
        pool = self._store.pool
        old, new = held.pages[position - held.first], pool.take(large)
        if pool.rename(group, old, new):
            self._store.tree.rename(group, old, new)
            self._store.changes.on_moved(group, old, new, self._store.tree.end_of(group, new) or 0)
        held.pages[position - held.first] = new
        held.sources[position] = ((0, 0), old)
        return holder, group, position, old, new


def _may_move(holder: Holder) -> bool:
    """Return whether a holder is no lease and its earlier moves are copied."""
    return holder.lease_until is None and not any(held.sources for held in holder.groups)
