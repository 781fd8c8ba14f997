"""How many pages a request needs at its worst, and how many it is known to want."""

from kvell.pages.layout import GroupSpec
from kvell.prefix.policies import GroupPolicy


def peak_pages(
    group: GroupSpec,
    policy: GroupPolicy,
    until_tokens: int,
    chunk_tokens: int,
    computed_tokens: int = 0,
) -> int:
    """Most pages held at once from ``computed_tokens`` to ``until_tokens`` in prefill chunks.

    Never more than lie between what is active now and the end.  A prefill chunk needs
    what stays live plus itself (``window + chunk`` in sliding and chunked-local groups);
    both ends may straddle a page.
    """
    size = group.page_tokens
    whole = -(-until_tokens // size) - policy.active_start(computed_tokens) // size
    live = policy.most_live_tokens(until_tokens)
    if live >= until_tokens:
        return whole
    return min(whole, -(-(live + chunk_tokens - 1) // size) + 1)


def demand_pages(
    group: GroupSpec, policy: GroupPolicy, expected_tokens: int, held_end: int, need: int
) -> int:
    """Pages a holder is known to want from now on: ``need`` of them at once.

    Groups that leave pages behind never want more than they keep alive.
    """
    size = group.page_tokens
    rest = -(-expected_tokens // size) - held_end
    live = -(-policy.most_live_tokens(expected_tokens) // size) + 1
    return max(need, min(rest, live))
