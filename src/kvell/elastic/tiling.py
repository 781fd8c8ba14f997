"""The overlap of large pages and chunks: the KV region's two divisions of the same bytes.

Chunk ``c`` is at home at byte ``c × chunk_bytes`` of the KV region, and large page ``l`` at
``l × large_page_bytes``; neither size need divide the other (ADR 14), so a chunk may hold the ends
of two large pages. A chunk can be given away only if no large page over it is needed.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvell.prefix.interface import WITHHELD, Ints, LongInts


def covering_bytes(large_page_bytes: int, chunk_bytes: int) -> int:
    """Return the smallest multiple of a large page that contains a whole chunk at any position.

    Chunks and large pages both tile the pool from its start, so offsets are multiples of their
    common divisor.
    """
    size_bytes = large_page_bytes
    while size_bytes < 2 * chunk_bytes - math.gcd(size_bytes, chunk_bytes):
        size_bytes += large_page_bytes
    return size_bytes


@dataclass(frozen=True)
class Tiling:
    """Chunks and large pages over one region; large pages fill it but for a tail."""

    num_chunks: int
    chunk_bytes: int
    large_page_bytes: int
    num_large: int

    def __post_init__(self) -> None:
        if self.num_large * self.large_page_bytes > self.num_chunks * self.chunk_bytes:
            raise ValueError("large pages reach beyond the last chunk")

    def larges_over(self, chunk: int) -> range:
        """Return the large pages with a byte in the chunk; none over the tail."""
        return range(int(self._first_large[chunk]), int(self._end_large[chunk]))

    def chunk_order(self, reclaim_order: LongInts) -> LongInts:
        """Return, by chunk, the largest number of the large pages over it [num_chunks].

        :param reclaim_order: by large page, see :meth:`WithholdingCore.reclaim_order`.
        """
        # One more at the end, so that every interval may end before an index that exists.
        padded = np.append(reclaim_order, np.int64(WITHHELD))
        bounds = np.stack([self._first_large, self._end_large], axis=1).ravel()
        highest: LongInts = np.maximum.reduceat(padded, bounds)[::2]
        highest[self._first_large == self._end_large] = WITHHELD
        return highest

    def withheld(self, taken: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return the large pages [num_large] over taken chunks [num_chunks]."""
        covered = np.zeros(self.num_large + 1, np.int64)
        chunks = np.flatnonzero(taken)
        np.add.at(covered, self._first_large[chunks], 1)
        np.add.at(covered, self._end_large[chunks], -1)
        inside: npt.NDArray[np.bool_] = np.cumsum(covered)[:-1] > 0
        return inside

    @cached_property
    def first_chunk(self) -> Ints:
        """The first chunk under each large page [num_large]."""
        begins = np.arange(self.num_large, dtype=np.int64) * self.large_page_bytes
        return (begins // self.chunk_bytes).astype(np.int32)

    @cached_property
    def end_chunk(self) -> Ints:
        """The index after the last chunk under each large page [num_large]."""
        ends = np.arange(1, self.num_large + 1, dtype=np.int64) * self.large_page_bytes
        return (-(-ends // self.chunk_bytes)).astype(np.int32)

    @cached_property
    def _first_large(self) -> Ints:
        begins = np.arange(self.num_chunks, dtype=np.int64) * self.chunk_bytes
        return np.minimum(begins // self.large_page_bytes, self.num_large).astype(np.int32)

    @cached_property
    def _end_large(self) -> Ints:
        ends = np.arange(1, self.num_chunks + 1, dtype=np.int64) * self.chunk_bytes
        return np.minimum(-(-ends // self.large_page_bytes), self.num_large).astype(np.int32)


def tiling(num_chunks: int, chunk_bytes: int, large_page_bytes: int) -> Tiling:
    """Tile ``num_chunks`` chunks with as many large pages as fit."""
    num_large = num_chunks * chunk_bytes // large_page_bytes
    return Tiling(num_chunks, chunk_bytes, large_page_bytes, num_large)
