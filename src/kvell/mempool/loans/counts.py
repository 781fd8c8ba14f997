"""The encoding of pages and counts in messages; decoders check what peers send."""

from collections.abc import Sequence

import numpy as np

Counts = tuple[int, ...]
"""The number of pages of each group, or the pages of a group."""


def encode_ints(values: Sequence[int]) -> bytes:
    """Return integers as little-endian int32."""
    return np.asarray(values, "<i4").tobytes()


def decode_counts(encoded: bytes, num_groups: int) -> Counts | None:
    """Return the counts of all groups, or None unless all are valid and one is positive."""
    if len(encoded) != 4 * num_groups:
        return None
    counts = np.frombuffer(encoded, "<i4")
    if not len(counts) or counts.min() < 0 or not counts.any():
        return None
    return tuple(counts.tolist())


def decode_pages(encoded: bytes, num_pages: int) -> list[int] | None:
    """Return page numbers, or None unless there are ``num_pages`` and none is negative."""
    if len(encoded) != 4 * num_pages:
        return None
    pages = np.frombuffer(encoded, "<i4")
    return None if len(pages) and pages.min() < 0 else pages.tolist()


def by_group(pages: Sequence[int], counts: Counts) -> tuple[Counts, ...]:
    """Return the same pages, separated by group."""
    ends = np.cumsum(counts).tolist()
    return tuple(tuple(pages[end - n : end]) for end, n in zip(ends, counts, strict=True))
