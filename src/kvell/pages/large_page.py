"""How large is the large page, for small pages of several sizes?

Source: Jenga §4.4 (why the least common multiple); ADR 1.
"""

import heapq
import math
from collections.abc import Iterator, Sequence

from kvell.pages.grouping import ALIGNMENT_BYTES, whole_pages
from kvell.vocabulary import MIB

LITTLE_PADDING = 0.01
"""As a fraction of a page: what models that register later may cost those that are there."""
MAX_PADDING = 0.05
"""Padding that may buy a smaller large page, as a fraction of a page."""
OPEN_PART = 0.25
"""Of a large page of each group: what a request leaves open and others of its group do not fill."""
ROUND_COUNTS = (1, 2, 4, 6, 12, 24, 60, 120, 240, 720, 840, 2520, 5040)
"""Counts with many divisors: a large page of such a multiple of cache lines is cut in many ways."""
TAME_FACTOR = 8
"""A least common multiple up to this many of the largest pages is taken as it is."""


def choose_large_page_bytes(
    page_bytes: Sequence[int], held_bytes: Sequence[int], pool_bytes: int
) -> tuple[int, str]:
    """Size of the large page for small pages of ``page_bytes``, and the rule that chose it.

    Rules, in order: ``lcm`` when the least common multiple is small; ``padded``, the size
    that pads no page by more than 5 % and costs a long request least; ``largest-page``
    when nothing else stays below 1/64 of the pool.

    :param held_bytes: what a long request holds in each group.
    """
    cap = min(pool_bytes // 64, max(64 * MIB, pool_bytes // 256))
    largest = max(page_bytes)
    lcm = math.lcm(*page_bytes)
    if lcm <= min(cap, TAME_FACTOR * largest) or lcm == largest:
        return lcm, "lcm"
    cheapest = _cheapest(page_bytes, held_bytes, cap)
    if cheapest:
        return cheapest, "padded"
    return _largest_page(page_bytes), "largest-page"


def cost_bytes(size: int, page_bytes: Sequence[int], held_bytes: Sequence[int]) -> float:
    """What a long request loses with large pages of ``size``: to padding, and to open ones."""
    padding = sum(
        held * (size / (size // page * page) - 1)
        for page, held in zip(page_bytes, held_bytes, strict=True)
    )
    return padding + OPEN_PART * size * len(page_bytes)


def _cheapest(page_bytes: Sequence[int], held_bytes: Sequence[int], cap: int) -> int:
    """The size that costs a long request least; 0 if there is none up to ``cap``."""
    best, least = 0, math.inf
    for size in padded_sizes(page_bytes, cap, MAX_PADDING):
        if OPEN_PART * size * len(page_bytes) >= least:
            break
        cost = cost_bytes(size, page_bytes, held_bytes)
        if cost < least:
            best, least = size, cost
    return best


def padded_sizes(
    page_bytes: Sequence[int], cap: int, max_padding: float = LITTLE_PADDING
) -> Iterator[int]:
    """Sizes into which every page goes with little padding, from small ones to large ones.

    Each is about a multiple of some page; a page below ``max_padding`` of the largest goes
    into anything, so no multiples of it are tried.
    """
    largest = max(page_bytes)
    steps = {p for p in page_bytes if p >= max_padding * largest}
    for near in heapq.merge(*(range(-(-largest // p) * p, cap + 1, p) for p in steps)):
        if any(near % p > max_padding * near for p in page_bytes):
            continue
        counts = [near // p for p in page_bytes]
        unit = ALIGNMENT_BYTES * math.lcm(*counts)
        size = -(-near // unit) * unit
        padding = max(size / (c * p) - 1 for c, p in zip(counts, page_bytes, strict=True))
        if size <= cap and padding <= max_padding:
            yield size


def _largest_page(page_bytes: Sequence[int]) -> int:
    """The largest page, or little more, so that the others pad least."""
    largest = max(page_bytes)
    units = [math.lcm(*(largest // p for p in page_bytes)), *ROUND_COUNTS]
    sizes = {
        -(-largest // (unit * ALIGNMENT_BYTES)) * unit * ALIGNMENT_BYTES
        for unit in units
        if unit * ALIGNMENT_BYTES <= largest or unit == 1
    }
    return min(sizes, key=lambda size: (max(size / _fills(size, p) for p in page_bytes), size))


def _fills(size: int, page_bytes: int) -> int:
    """Bytes of a large page that whole pages of one group fill."""
    return whole_pages(size, page_bytes) * page_bytes
