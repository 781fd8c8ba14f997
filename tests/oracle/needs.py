"""The pages of a group that a holder lacks, now and later."""

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import WINDOWS, end_position
from kvell.prefix.groups.policies import policy_of


def returning_pages(group: GroupSpec, facts: Facts, held_first: int) -> int:
    """Return the number of pages before the held ones that are missing, being no longer remote."""
    if group.kind is not GroupKind.FULL or not held_first:
        return 0
    return held_first - facts.away_tokens // group.page_tokens


def demand_pages(
    group: GroupSpec, facts: Facts, expected_tokens: int, held_end: int, need: int
) -> int:
    """Return how many more pages a holder is expected to need; it needs ``need`` of them now.

    Groups that release pages before a window never need more than they keep.
    """
    rest = end_position(group, facts, expected_tokens) - held_end
    if group.kind in WINDOWS:
        kept = policy_of(group).most_kept_tokens(expected_tokens)
        rest = min(rest, -(-kept // group.page_tokens) + 1)
    return max(need, rest)
