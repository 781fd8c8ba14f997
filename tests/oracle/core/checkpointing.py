"""Pages for states within a prompt (like ``csrc/memory/checkpoints``)."""

from kvell.prefix.eviction.checkpoints import is_worth_displacing
from kvell.prefix.groups.needs import alignment_tokens
from tests.oracle.eviction.checkpoints import cuts, waypoint_tokens
from tests.oracle.eviction.evictor import COARSE
from tests.oracle.placement.holders import Checkpoint, Holder
from tests.oracle.placement.store import Store


def keep_states(store: Store, holder: Holder, group: int, until: int) -> list[tuple[int, ...]]:
    """Reserve pages for the states worth keeping, the most valuable first.

    :returns: rows of group, tokens before the state, part of the state, page.
    """
    own = [store.groups[index] for index in holder.own]
    alignment = alignment_tokens(own)
    positions = cuts(
        holder.computed,
        until,
        holder.facts.prompt_tokens,
        holder.matched_tokens,
        alignment,
        waypoint_tokens(own, alignment, holder.facts.prompt_tokens),
    )
    rows: list[tuple[int, ...]] = []
    spec = store.groups[group]
    ranked = [(store.usefulness.rank(sort), cut, sort) for cut, sort in positions]
    for full_rank, cut, sort in sorted(ranked, reverse=True):
        worth = is_worth_displacing(spec, own, cut - holder.hit_tokens)
        rank = full_rank if worth else min(full_rank, COARSE)
        limit = store.rule.limit(rank, store.step)
        pages = store.placer.keep(group, spec.slices, rank, limit)
        if pages is not None:
            holder.checkpoints.append(Checkpoint(group, cut, sort, rank, tuple(pages)))
            rows.extend((group, cut, part, page) for part, page in enumerate(pages))
    return rows
