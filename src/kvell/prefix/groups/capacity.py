"""The capacity of a layout when nothing else is in the pool.

The page counts are those of the scheduler's admission, so a request that fits here fits there too.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvell.pages.layout import GroupSpec, Layout
from kvell.pages.sizing import larges_for
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import WINDOWS, end_position, peak_pages, resumed_from
from kvell.prefix.groups.policies import policy_of

Ints = npt.NDArray[np.int32]


def large_pages_needed(
    layout: Layout, tokens: int, requests: int = 1, chunk_tokens: int = 1
) -> int:
    """Return the large pages that ``requests`` requests of ``tokens`` tokens need at worst.

    With equal shares this is the pool in which every group's share is enough.

    :param chunk_tokens: tokens computed in a step: 1 while decoding; a prefill chunk needs ``window
        + chunk`` in sliding and chunked-local groups.
    """
    needs = _needs(layout, tokens, requests, chunk_tokens)
    if layout.quota_large_pages is None:
        return sum(needs)
    # With equal shares: the fewest pages per group that give every group its large pages.
    per_large = [group.pages_per_large for group in layout.groups]
    pages = max(0, *((need - 1) * n + 1 for need, n in zip(needs, per_large, strict=True)))
    return sum(larges_for(pages, per_large))


def pages_of_text(layout: Layout, tokens: int, model: str = "") -> Ints:
    """Return the pages that a request needs to resume after a text of ``tokens`` tokens
    [groups, :class:`.PageCountRow`] (of a window its end, of states one)."""
    facts = Facts(tokens)
    rows = [(0, 0)] * len(layout.groups)
    for index, group in enumerate(layout.groups):
        if group.model == model:
            first = resumed_from(group, policy_of(group), facts, tokens)
            rows[index] = first, end_position(group, facts, tokens, tokens) - first
    return np.asarray(rows, np.int32)


def request_bytes(layout: Layout, tokens: int, chunk_tokens: int = 1) -> int:
    """Return the bytes of all pages of one request at its peak, padding included."""
    return sum(
        peak_pages(group, Facts(tokens), tokens, chunk_tokens) * group.page_stride_bytes
        for group in layout.groups
    )


def fits_alone(layout: Layout, facts: Facts, tokens: int, chunk_tokens: int) -> bool:
    """Return whether a request with these facts fits when nothing else is in the pool."""
    needs = [_large_pages(group, facts, tokens, 1, chunk_tokens) for group in layout.groups]
    return _within(layout, needs)


def longest_request(layout: Layout, limit_tokens: int, chunk_tokens: int = 1) -> int:
    """Return the longest request that fits alone, in tokens up to ``limit_tokens``; 0 if none."""
    return largest(limit_tokens, lambda n: _fits(layout, n, 1, min(n, chunk_tokens)))


def requests_that_fit(layout: Layout, tokens: int, limit: int = 1 << 20) -> int:
    """Return how many requests of ``tokens`` tokens can decode together."""
    return largest(limit, lambda n: _fits(layout, tokens, n, 1))


def pool_bytes_for(layout: Layout, tokens: int, chunk_tokens: int = 1) -> int:
    """Return the pool that one request of ``tokens`` tokens needs, in whole large pages."""
    return large_pages_needed(layout, tokens, 1, chunk_tokens) * layout.large_page_bytes


def _fits(layout: Layout, tokens: int, requests: int, chunk_tokens: int) -> bool:
    return _within(layout, _needs(layout, tokens, requests, chunk_tokens))


def _within(layout: Layout, needs: list[int]) -> bool:
    if layout.quota_large_pages is None:
        return sum(needs) <= layout.num_large_pages
    return all(n <= share for n, share in zip(needs, layout.quota_large_pages, strict=True))


def _needs(layout: Layout, tokens: int, requests: int, chunk_tokens: int) -> list[int]:
    """Return the peak of large pages per group."""
    facts = Facts(tokens)
    return [_large_pages(group, facts, tokens, requests, chunk_tokens) for group in layout.groups]


def _large_pages(
    group: GroupSpec, facts: Facts, tokens: int, requests: int, chunk_tokens: int
) -> int:
    """Return the large pages of a group; a moving window may straddle one more than it fills."""
    per_large = group.pages_per_large
    moves_on = group.kind in WINDOWS and policy_of(group).most_kept_tokens(tokens) < tokens
    pages = requests * peak_pages(group, facts, tokens, chunk_tokens)
    whole = end_position(group, facts, tokens) * requests
    return -(-min(whole, pages + (per_large - 1 if moves_on else 0)) // per_large)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to ``limit`` that fits, as 0 and all below one do."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
