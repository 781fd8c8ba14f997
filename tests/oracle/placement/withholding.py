"""Large pages that another owner uses for a while: their order, withholding and return."""

import numpy as np

from kvell.prefix.interface import CACHED, EMPTY, RANK_SHIFT, USED, WITHHELD, Ints, LongInts
from tests.oracle.placement.store import Store


class Withholder:
    """The :class:`kvell.prefix.interface.WithholdingCore` of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def reclaim_order(self) -> LongInts:
        count = len(self._store.pool.group)
        return np.asarray([self._reclaimed_at(large) for large in range(count)], np.int64)

    def _reclaimed_at(self, large: int) -> int:
        pool = self._store.pool
        if pool.used[large]:
            return USED
        if pool.cached[large]:
            rank, time, _ = self._store.evictor.youngest(large)
            return CACHED + (rank << RANK_SHIFT) + time
        return WITHHELD if large in pool.withheld else EMPTY

    def withhold(self, larges: Ints) -> None:
        pool = self._store.pool
        _check_larges(larges, len(pool.group))
        if pool.has_shares:
            raise ValueError("the pool was cut into shares at start: there is none to give")
        for large in larges.tolist():
            if pool.used[large] or large in pool.withheld:
                raise ValueError(f"large page {large} is not available")
        for large in larges.tolist():
            if pool.cached[large]:
                self._store.placer.evict_large(large)
            pool.withhold(large)

    def restore(self, larges: Ints) -> None:
        pool = self._store.pool
        _check_larges(larges, len(pool.group))
        for large in larges.tolist():
            if large not in pool.withheld:
                raise ValueError(f"large page {large} is not withheld")
        for large in larges.tolist():
            pool.restore(large)


def _check_larges(larges: Ints, count: int) -> None:
    if len(larges) and not 0 <= int(larges.min()) <= int(larges.max()) < count:
        raise ValueError(f"there is no such large page: they are 0 to {count - 1}")
    if len(np.unique(larges)) != len(larges):
        raise ValueError("a large page is named twice")
