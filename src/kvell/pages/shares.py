"""Fixed shares of a pool: large pages of each group if memory is cut at start."""

from collections.abc import Sequence


def larges_for(pages: int, pages_per_large: Sequence[int]) -> list[int]:
    """Return the large pages that ``pages`` pages take in each group."""
    return [-(-pages // count) for count in pages_per_large]


def equal_shares(pages_per_large: Sequence[int], num_large_pages: int) -> tuple[int, ...]:
    """Return large pages of each group if all get the same number of pages, as many as fit.

    All zero if the pool has fewer large pages than groups.
    """
    low = 0
    high = num_large_pages * max(pages_per_large)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(larges_for(middle, pages_per_large)) <= num_large_pages:
            low = middle
        else:
            high = middle - 1
    return tuple(larges_for(low, pages_per_large))


def proportional_shares(weights: Sequence[int], num_large_pages: int) -> tuple[int, ...]:
    """Return large pages of each group in proportion to its weight, at least one each.

    All are given out; the groups that lost most by rounding get the remainder. All zero if the pool
    has fewer large pages than groups.
    """
    spare = num_large_pages - len(weights)
    if spare < 0:
        return (0,) * len(weights)
    total = sum(weights)
    shares = [1 + spare * weight // total for weight in weights]
    lost = sorted(range(len(weights)), key=lambda i: -(spare * weights[i] % total))
    for i in lost[: num_large_pages - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
