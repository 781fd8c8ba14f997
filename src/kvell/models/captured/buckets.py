"""Sizes of recorded steps: a step runs in the smallest that holds its rows."""

from bisect import bisect_left
from collections.abc import Sequence

FEWEST = (1, 2, 4, 8)
STEPS = ((32, 8), (128, 16), (512, 64))
"""Pairs: up to the first number of rows, sizes lie the second number apart; beyond, the last."""


def bucket_sizes(most_rows: int) -> tuple[int, ...]:
    """Return the sizes, ascending; the last one holds ``most_rows``.

    :raises ValueError: if there is no row.
    """
    if most_rows < 1:
        raise ValueError(f"most_rows={most_rows}: a step has one row or more")
    sizes = list(FEWEST)
    while sizes[-1] < most_rows:
        apart = next((apart for most, apart in STEPS if sizes[-1] < most), STEPS[-1][1])
        sizes.append(sizes[-1] + apart)
    return tuple(sizes[: bisect_left(sizes, most_rows) + 1])


def smallest(sizes: Sequence[int], rows: int) -> int | None:
    """Return the smallest size that holds ``rows``; None if none does."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None
