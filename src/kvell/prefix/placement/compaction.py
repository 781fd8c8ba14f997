"""Gathering scattered pages: into large pages of a request's own, or where others are denser.

A request that outlives what was expected of it gets page after page in holes of other
requests' large pages.  When those requests end, what they leave there is stranded: no
other group can get it.  So while there are large pages to spare, pages that lie in sparse
ones are moved, a large page at a time, into one that the request then has alone.  While there
are none, they are moved one by one into holes of denser large pages, until sparse ones have no
used page left and any group can get them.  The paper keeps a request's pages together only
when it takes them (Jenga §4.3).
"""

from collections.abc import Iterator, Sequence

from kvell.prefix.placement.holders import GroupPages, Holder
from kvell.prefix.placement.store import Store

SPREAD = 64
"""Worth looking when at least one byte in so many is in a used large page, yet not used, or when
each large page has a used page."""
SPARE_LARGE = 16
"""Only while one large page in so many has no used page."""
SPARSE = 2
"""A large page is sparse when at most one page in so many is used."""
SCAN_PAGES = 4096
"""Pages looked at in one call, at most (and what one group of one request has above them)."""
SQUEEZED_PAGES = 64
"""Moved into denser large pages in one call, at most."""
MOST_REST = 31
"""Calls without a look at most, after one that found nothing to move into denser large pages."""


class Compactor:
    """Goes round the requests, a few at each call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        self._rest = self._rests = 0

    def compact(
        self, holders: Sequence[Holder], most_large: int
    ) -> Iterator[tuple[Holder, int, int, int, int]]:
        """Move pages; yields (holder, group, position, old page, new page) for each.

        The old page is the holder's until it is copied: among its ``sources``.

        :param holders: by handle.
        :param most_large: large pages of requests' own to fill.
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
        """From where the last call ended."""
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
        """Positions of pages to move, each with a denser large page that has an empty page."""
        pool = self._store.pool
        per_large = pool.pages_per_large[group]
        if per_large == 1 or pool.supply.partial[group] < per_large or most <= 0:
            return
        for position in self._scattered(group, held, most):
            own = held.pages[position - held.first] // per_large
            large = self._store.placer.denser(group, own)
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
        """Positions of pages that lie in sparse large pages, the first ones."""
        pool = self._store.pool
        per_large = pool.pages_per_large[group]
        found: list[int] = []
        for position, page in enumerate(held.pages[:SCAN_PAGES], start=held.first):
            sparse = pool.used[page // per_large] * SPARSE <= per_large
            if sparse and pool.refs[group][page] == 1:
                found.append(position)
                if len(found) == most:
                    break
        return found

    def _move(
        self, holder: Holder, group: int, held: GroupPages, position: int, large: int
    ) -> tuple[Holder, int, int, int, int]:
        pool = self._store.pool
        old, new = held.pages[position - held.first], pool.take(large)
        if pool.rename(group, old, new):
            self._store.tree.rename(group, old, new)
            self._store.changes.moved(group, old, new, self._store.tree.end_of(group, new) or 0)
        held.pages[position - held.first] = new
        held.sources[position] = ((0, 0), old)
        return holder, group, position, old, new


def _may_move(holder: Holder) -> bool:
    """Nobody else counts on where its pages lie, and what was moved before is copied."""
    return holder.lease_until is None and not any(held.sources for held in holder.groups)
