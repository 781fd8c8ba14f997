"""Copies of pages from one instance's memory to another's, in as few pieces as there are gaps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvell.memory import GroupSpec, Ints
from kvell.pages.stages import Part

Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """Bytes that lie together on both sides: offsets and a size in bytes."""

    source: int
    target: int
    size_bytes: int


def pieces_of(groups: Sequence[GroupSpec], rows: Ints) -> list[Piece]:
    """What to copy for rows [m, 3]: group, page there, page here; neighbours become one piece.

    Source: MemServe §5.2, where aggregated blocks take fewer calls.
    """
    return parts_of(groups, rows, {i: (0, g.page_stride_bytes) for i, g in enumerate(groups)})


def parts_of(groups: Sequence[GroupSpec], rows: Ints, parts: Mapping[int, Part]) -> list[Piece]:
    """What to copy of the same rows for a part of each page; nothing of groups without a part."""
    strides = np.asarray([group.page_stride_bytes for group in groups], np.int64)
    begins, ends = np.zeros((2, len(groups)), np.int64)
    for index, (begin, end) in parts.items():
        begins[index], ends[index] = begin, end
    some = rows[np.isin(rows[:, 0], list(parts))]
    group = some[:, 0]
    source = some[:, 1] * strides[group] + begins[group]
    target = some[:, 2] * strides[group] + begins[group]
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
    """Copy; returns the number of bytes.  Python's lock is free during each piece."""
    total = 0
    for one in pieces:
        end = one.source + one.size_bytes
        np.copyto(target[one.target : one.target + one.size_bytes], source[one.source : end])
        total += one.size_bytes
    return total
