"""Reservations of pages for a later text, and the deletion of texts."""

from collections.abc import Sequence

import numpy as np

from kvell.prefix.groups.facts import facts_of
from kvell.prefix.groups.needs import dropped_tokens, end_position, resumed_from
from kvell.prefix.tokens import Tokens
from tests.oracle.index.radix import Node
from tests.oracle.pages.demand import feasible
from tests.oracle.placement.holders import GroupPages, Holder
from tests.oracle.placement.store import Store

RESERVED_ROOT = "\0reserved"
"""The root of holders without a text; no page is ever named under it."""


def reserve(
    store: Store, handle: int, counts: Sequence[int], model: str, lease_until: int
) -> Holder | None:
    """Return a holder of ``counts`` pages of each group, or None if there are too few."""
    own = store.own(model)
    if len(counts) != len(store.groups) or any(count < 0 for count in counts):
        raise ValueError("one number of pages is needed for each group")
    if any(count and index not in own for index, count in enumerate(counts)):
        raise ValueError(f"pages of a group that is not of model {model!r} cannot be reserved")
    if not feasible(list(counts), store.pool.supply):
        return None
    node = store.tree.root(f"{model}/{RESERVED_ROOT}")
    store.tree.hold(node)
    store.pool.open_holder(handle)
    pages = store.placer.place(handle, counts, counts, list(counts))
    return Holder(
        handle,
        f"{model}/{RESERVED_ROOT}",
        np.empty(0, np.int32),
        facts_of(0, None, None),
        own,
        node,
        [GroupPages(0, some) for some in pages],
        hit_tokens=0,
        matched_tokens=0,
        expected_tokens=0,
        lease_until=lease_until,
        renewed_step=store.step,
        is_reservation=True,
    )


def adopt(
    store: Store, holder: Holder, tokens: Tokens, root: str, prompt_tokens: int | None
) -> None:
    facts, computed = facts_of(len(tokens), prompt_tokens, None), len(tokens)
    firsts = {}
    for index, held in holder.own_groups():
        group = store.groups[index]
        firsts[index] = resumed_from(group, store.policies[index], facts, computed)
        needed = end_position(group, facts, computed, computed) - firsts[index]
        if dropped_tokens(group, facts) or len(held.pages) != needed:
            raise ValueError(f"the pages of handle {holder.handle} are not those of this text")
    if not holder.is_reservation or not computed:
        raise ValueError(f"handle {holder.handle} is not a reservation, or there is no text")
    model = store.groups[holder.own[0]].model
    holder.is_reservation, holder.is_receiving = False, True
    holder.tokens, holder.facts = np.array(tokens, np.int32), facts
    holder.root = f"{model}/{root}"
    holder.computed = holder.expected_tokens = computed
    for index, held in holder.own_groups():
        held.first = firsts[index]
    old, holder.node = holder.node, store.tree.root(holder.root)
    store.tree.hold(holder.node)
    store.tree.let_go(old)


def delete(store: Store, tokens: Tokens, root: str) -> int:
    """Evict cached pages of a text up to a branch from another, and return their number."""
    evicted = 0
    length = len(tokens)
    while length:
        path = list(store.tree.walk(root, tokens[:length]))
        if not path or path[-1][1] < length or path[-1][0].end > length:
            break
        node = path[-1][0]
        if node.children or node.holders:
            break
        length = node.start
        evicted += _evict(store, node)
    return evicted


def _evict(store: Store, node: Node) -> int:
    """Evict a node's pages without a user and return their number."""
    pages = [
        (group, page)
        for group, places in enumerate(node.pages)
        for page in sorted(places.values())
        if page not in store.pool.refs[group]
    ]
    for group, page in pages:
        store.placer.evict_cached(group, page)
    return len(pages)
