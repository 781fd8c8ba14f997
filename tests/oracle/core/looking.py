"""A core's state as plain data: the division of the pool, and a full snapshot for the audit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvell.pages.snapshot import NO_GROUP, HolderSnapshot, IndexEntry, PoolSnapshot, PoolTotals
from kvell.prefix.interface import (
    NO_END,
    NO_STEP,
    WITHHELD_GROUP,
    LongInts,
)
from kvell.vocabulary import PageId
from tests.oracle.placement.holders import Holder
from tests.oracle.placement.store import Store


@dataclass(frozen=True)
class Counters:
    """The counters of a core outside its store.

    :ivar hit_tokens: tokens of the prefix hits of claimed requests.
    :ivar group_hit_tokens: per group, tokens of the cached pages that these hits took.
    :ivar checkpoint_pages: per group, pages written for states within prompts.
    """

    hit_tokens: int
    group_hit_tokens: Sequence[int]
    checkpoint_pages: Sequence[int]


def empty_large_of(store: Store) -> int:
    """Return the number of large pages without used or cached pages."""
    return store.pool.group.count(NO_GROUP) - len(store.pool.withheld)


def totals_of(store: Store, counters: Counters) -> PoolTotals:
    """Return the division of the pool and counters so far."""
    pool, groups = store.pool, range(len(store.groups))
    by_group = list(zip(pool.group, pool.used, pool.cached, strict=True))
    written = [0 for _ in groups]
    for group, used, count in zip(pool.group, pool.used, pool.written, strict=True):
        written[group] += count if used else 0
    used_pages = [sum(used for g, used, _ in by_group if g == group) for group in groups]
    partial = pool.supply.partial
    return PoolTotals(
        empty_large_of(store),
        tuple(used_pages),
        tuple(sum(cached for g, _, cached in by_group if g == group) for group in groups),
        tuple(store.placer.evicted_pages),
        counters.hit_tokens,
        dict(store.placer.rungs),
        tuple(partial[g] + used_pages[g] - written[g] for g in groups),
        tuple(written[g] - used_pages[g] for g in groups),
        tuple(counters.group_hit_tokens),
        tuple(counters.checkpoint_pages),
    )


def large_pages_of(store: Store) -> LongInts:
    pool = store.pool
    rows = []
    for large, (group, used, cached) in enumerate(
        zip(pool.group, pool.used, pool.cached, strict=True)
    ):
        step = store.evictor.youngest(large)[1] if cached and not used else NO_STEP
        rows.append((WITHHELD_GROUP if large in pool.withheld else group, used, cached, step))
    return np.asarray(rows, np.int64).reshape(-1, 4)


def small_pages_of(store: Store, large: int) -> LongInts:
    pool = store.pool
    if not 0 <= large < len(pool.group):
        raise ValueError(f"there is no such large page: they are 0 to {len(pool.group) - 1}")
    group = pool.group[large]
    rows = []
    for page in _pages_in(store, large) if group != NO_GROUP else ():
        end, key = store.tree.end_of(group, page), pool.indexed[group].get(page)
        step = NO_STEP if key is None else key[1]
        rows.append((page, pool.refs[group].get(page, 0), NO_END if end is None else end, step))
    return np.asarray(rows, np.int64).reshape(-1, 4)


def _pages_in(store: Store, large: int) -> range:
    count = store.pool.pages_per_large[store.pool.group[large]]
    return range(large * count, (large + 1) * count)


def snapshot_of(store: Store, holders: Iterable[Holder], hit_tokens: int) -> PoolSnapshot:
    pool, supply = store.pool, store.pool.supply
    return PoolSnapshot(
        group=tuple(pool.group),
        owner=tuple(pool.owner),
        used=tuple(pool.used),
        cached=tuple(pool.cached),
        empty_masks=tuple(pool.empty_mask),
        refs=tuple(dict(refs) for refs in pool.refs),
        keys=tuple(dict(keys) for keys in pool.indexed),
        whole=supply.whole,
        partial=supply.partial,
        holders=tuple(_of_holder(holder) for holder in holders),
        index=tuple(
            IndexEntry(group, PageId(page), *place, node.start, node.end)
            for group, page, node, place in store.tree.named_pages()
        ),
        num_nodes=sum(1 for _ in store.tree.nodes()),
        evicted_pages=tuple(store.placer.evicted_pages),
        hit_tokens=hit_tokens,
        rungs=dict(store.placer.rungs),
        withheld=tuple(sorted(pool.withheld)),
    )


def _of_holder(holder: Holder) -> HolderSnapshot:
    return HolderSnapshot(
        holder.handle,
        holder.computed,
        holder.published,
        holder.lease_until is not None,
        tuple((held.first, tuple(held.pages)) for held in holder.groups),
        tuple(_other_pages(holder)),
        holder.is_receiving,
        holder.is_reservation,
        holder.facts.away_tokens,
    )


def _other_pages(holder: Holder) -> Iterator[tuple[int, int]]:
    """Yield (group, page) of the holder's copy sources and of its pages for states."""
    for index, held in holder.own_groups():
        yield from ((index, page) for _, page in held.sources.values())
    for checkpoint in holder.checkpoints:
        yield from ((checkpoint.group, page) for page in checkpoint.pages)
