"""The joint question of a step: do all groups get the pages they need, together?

Large pages without a used page (empty, or evictable as a whole) can go to any
group.  In large pages that hold a used page, the other pages (empty or cached)
can only go to their own group.  So a demand is feasible exactly when the whole
large pages that the groups still need, added up, do not exceed those there are.
Solving group by group instead can fail a feasible step: one group eats the large
page that another needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Supply:
    """What could be handed out now.

    :param whole: large pages without a used page.
    :param partial: per group, pages not used inside large pages that hold a used one.
    :param pages_per_large: per group.
    """

    whole: int
    partial: tuple[int, ...]
    pages_per_large: tuple[int, ...]


def whole_needed(need: Sequence[int], supply: Supply) -> list[int]:
    """Whole large pages each group needs for ``need`` pages beyond its partial ones."""
    return [
        max(0, -(-(n - p) // k))
        for n, p, k in zip(need, supply.partial, supply.pages_per_large, strict=True)
    ]


def feasible(need: Sequence[int], supply: Supply) -> bool:
    """Can every group get its ``need`` pages in the same step?"""
    return sum(whole_needed(need, supply)) <= supply.whole
