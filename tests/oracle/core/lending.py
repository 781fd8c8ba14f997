"""Requests whose first tokens are on another instance (like ``csrc/memory/lending``)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.needs import kept_from
from tests.oracle.core.publishing import Publisher
from tests.oracle.placement.holders import Holder
from tests.oracle.placement.store import Store


def send_away(store: Store, publisher: Publisher, holder: Holder, away_tokens: int) -> None:
    reason = _why_not([store.groups[index] for index in holder.own], holder, away_tokens)
    if reason:
        raise ValueError(f"tokens of handle {holder.handle} cannot be remote: {reason}")
    holder.facts = replace(holder.facts, away_tokens=away_tokens)
    publisher.leave_behind(holder)
    for index, held in holder.own_groups():
        group = store.groups[index]
        # A drafter may have fewer pages than are remote.
        if group.kind is GroupKind.FULL and not held.pages:
            start = kept_from(group, store.policies[index], holder.facts, holder.computed)
            held.first = max(held.first, start)


def _why_not(groups: Sequence[GroupSpec], holder: Holder, away_tokens: int) -> str:
    """Return why the tokens cannot be remote, or "" if they can."""
    full = [group.page_tokens for group in groups if group.kind is GroupKind.FULL]
    if any(group.kind is GroupKind.DROPPING for group in groups):
        return "its model drops tokens"
    if any(group.counts_images for group in groups):
        return "its model counts images in pages of the text"
    if not full:
        return "its model has no full attention"
    if holder.is_reservation or holder.lease_until is not None:
        return "it is a lease or a reservation"
    sources = [place for held in holder.groups for place, _ in held.sources.values()]
    # A moved page (0 tokens) stays until the next step, and is copied in any case.
    if any(tokens for tokens, _ in sources) or (sources and away_tokens < holder.facts.away_tokens):
        return "copies to its pages are pending"
    if not 0 <= away_tokens <= holder.computed:
        return f"{away_tokens} of {holder.computed} computed tokens"
    if away_tokens % math.lcm(*full):
        return f"{away_tokens} tokens end inside a page"
    return ""
