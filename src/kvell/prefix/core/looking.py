"""A core's state as plain data: how the pool is divided, and everything, for the audit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvell.pages.pool import NO_GROUP
from kvell.pages.snapshot import HolderSnapshot, IndexEntry, PoolSnapshot, PoolTotals
from kvell.prefix.placement.holders import Holder
from kvell.prefix.placement.store import Store


@dataclass(frozen=True)
class Counters:
    """What a core has counted beside its store.

    :ivar hit_tokens: of claimed requests' prefixes.
    :ivar group_hit_tokens: per group, of the cached pages that these took.
    :ivar checkpoint_pages: per group, written for states on the way.
    """

    hit_tokens: int
    group_hit_tokens: Sequence[int]
    checkpoint_pages: Sequence[int]


def empty_large_of(store: Store) -> int:
    """Large pages that nobody uses and that cache nothing."""
    return store.pool.group.count(NO_GROUP) - len(store.pool.withheld)


def totals_of(store: Store, counters: Counters) -> PoolTotals:
    """How the pool is divided now, and counters so far."""
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


def snapshot_of(store: Store, holders: Iterable[Holder], hit_tokens: int) -> PoolSnapshot:
    """The whole state."""
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
            IndexEntry(group, page, *place, node.start, node.end)
            for group, page, node, place in store.tree.named()
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
    )


def _other_pages(holder: Holder) -> Iterator[tuple[int, int]]:
    """(group, page) of pages that the holder uses but not as its own: to copy, to write states."""
    for index, held in holder.own_groups():
        yield from ((index, page) for _, page in held.sources.values())
    for checkpoint in holder.checkpoints:
        yield from ((checkpoint.group, page) for page in checkpoint.pages)
