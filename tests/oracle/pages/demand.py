"""The test whether all groups together can get the pages that they need in one step.

Large pages without a used page (empty, or evictable as a whole) can become any group's. In large
pages that hold a used page, the other pages (empty or cached) can only be used by their own group.
So a demand is feasible exactly if the groups together need no more whole large pages than there
are. A solution group by group can fail a feasible step: one group takes the large page that another
needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Supply:
    """The pages that could be handed out now.

    :param whole: large pages without a used page.
    :param partial: per group, unused pages inside large pages that hold a used one.
    :param pages_per_large: per group.
    :param shares: per group, whole large pages that its share of the pool still has; None if any
        group may take all of them. Shares together never exceed the pool, so a group that takes its
        own takes from no other.
    """

    whole: int
    partial: tuple[int, ...]
    pages_per_large: tuple[int, ...]
    shares: tuple[int, ...] | None = None


def whole_needed(need: Sequence[int], supply: Supply) -> list[int]:
    """Return the whole large pages each group needs for ``need`` pages beyond its partial ones."""
    return [
        max(0, -(-(n - p) // k))
        for n, p, k in zip(need, supply.partial, supply.pages_per_large, strict=True)
    ]


def feasible(need: Sequence[int], supply: Supply) -> bool:
    """Return whether every group can get its ``need`` pages in the same step."""
    whole = whole_needed(need, supply)
    if supply.shares is not None:
        return all(w <= share for w, share in zip(whole, supply.shares, strict=True))
    return sum(whole) <= supply.whole


def may_take_whole(group: int, left: Sequence[int], supply: Supply) -> bool:
    """Return whether the group can take a whole large page and what is ``left`` still fits."""
    if supply.shares is not None:
        return supply.shares[group] > 0
    whole = whole_needed(left, supply)
    return whole[group] > 0 or sum(whole) < supply.whole
