"""Copies of pages between the memories of two instances, merged into few pieces."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvell.memory import GroupSpec, Ints
from kvell.pages.rows import PulledPageRow
from kvell.pages.stages import Part

Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """Bytes that are contiguous on both sides: offsets and a size in bytes."""

    source: int
    target: int
    size_bytes: int


def pieces_of(groups: Sequence[GroupSpec], rows: Ints) -> list[Piece]:
    """Return the pieces to copy for rows [m, :class:`.PulledPageRow`].

    Adjacent pages become one piece (MemServe §5.2, where aggregated blocks take fewer calls).
    """
    return parts_of(groups, rows, {i: (0, g.page_stride_bytes) for i, g in enumerate(groups)})


def parts_of(groups: Sequence[GroupSpec], rows: Ints, parts: Mapping[int, Part]) -> list[Piece]:
    """Return the pieces for a part of each page of the rows; groups without a part have none."""
    strides = np.asarray([group.page_stride_bytes for group in groups], np.int64)
    begins, ends = np.zeros((2, len(groups)), np.int64)
    for index, (begin, end) in parts.items():
        begins[index], ends[index] = begin, end
    some = rows[np.isin(rows[:, PulledPageRow.GROUP], list(parts))]
    group = some[:, PulledPageRow.GROUP]
    source = some[:, PulledPageRow.SOURCE] * strides[group] + begins[group]
    target = some[:, PulledPageRow.TARGET] * strides[group] + begins[group]
    sizes = (ends - begins)[group]
    order = np.argsort(source, kind="stable")
    return list(_merged(source[order].tolist(), target[order].tolist(), sizes[order].tolist()))


def _merged(sources: list[int], targets: list[int], sizes: list[int]) -> Iterator[Piece]:
    last: Piece | None = None
    for source, target, size in zip(sources, targets, sizes, strict=True):
        follows = last is not None and (
            last.source + last.size_bytes == source and last.target + last.size_bytes == target
        )
        if last is not None and follows:
            last = Piece(last.source, last.target, last.size_bytes + size)
            continue
        if last is not None:
            yield last
        last = Piece(source, target, size)
    if last is not None:
        yield last


def copy_pieces(pieces: Sequence[Piece], source: Bytes, target: Bytes) -> int:
    """Copy pieces and return the number of bytes.  Python's lock is free during each piece."""
    total = 0
    for piece in pieces:
        end = piece.source + piece.size_bytes
        np.copyto(
            target[piece.target : piece.target + piece.size_bytes], source[piece.source : end]
        )
        total += piece.size_bytes
    return total
