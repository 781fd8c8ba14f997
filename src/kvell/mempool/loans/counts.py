"""Pages of each group as messages carry them; what strangers send is checked."""

from collections.abc import Sequence

import numpy as np

Counts = tuple[int, ...]
"""Pages of each group."""


def encode_ints(values: Sequence[int]) -> bytes:
    """Little-endian int32."""
    return np.asarray(values, "<i4").tobytes()


def decode_counts(encoded: bytes, num_groups: int) -> Counts | None:
    """Pages of each group; None unless there is a number for each, and one page at least."""
    if len(encoded) != 4 * num_groups:
        return None
    counts = np.frombuffer(encoded, "<i4")
    if not len(counts) or counts.min() < 0 or not counts.any():
        return None
    return tuple(counts.tolist())


def decode_pages(encoded: bytes, num_pages: int) -> list[int] | None:
    """Page ids; None unless there are so many, and none is negative."""
    if len(encoded) != 4 * num_pages:
        return None
    pages = np.frombuffer(encoded, "<i4")
    return None if len(pages) and pages.min() < 0 else pages.tolist()


def by_group(pages: Sequence[int], counts: Counts) -> tuple[Counts, ...]:
    """The same pages, for each group those of it."""
    ends = np.cumsum(counts).tolist()
    return tuple(tuple(pages[end - n : end]) for end, n in zip(ends, counts, strict=True))
