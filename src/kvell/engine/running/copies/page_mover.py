"""Copies of pages: within the pool, out to the CPU buffer, and back in.

On a GPU the copies run on the stream of the step's computation, and the buffer is pinned: pages
that a plan copies out are complete before a later plan copies them in, and no thread waits.  In
host memory the calling thread copies alone: one thread nearly reaches the memory's bandwidth, and
several threads for each page would wait for busy processors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.memory import Layout
from kvell.pages.rows import FetchRow, OffloadRow
from kvell.pages.stages import Part
from kvell.runs import runs

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Piece:
    """Pages of a group that are consecutive on both sides.

    :param source: the first page that is read; ``target`` is the first that is written.
    """

    group: int
    source: int
    target: int
    count: int


class PageMover:
    """The executor of plans' copies.

    :param pool: uint8 [bytes], on the models' device.
    :param buffer: uint8 [bytes], host memory; None if plans offload nothing.
    """

    def __init__(self, layout: Layout, pool: torch.Tensor, buffer: torch.Tensor | None) -> None:
        self.layout, self.pool, self.buffer = layout, pool, buffer
        self._in_host = pool.device.type == "cpu"

    def offload(self, rows: NewPages) -> None:
        """Copy out [m, :class:`.OffloadRow`]."""
        for piece in self.pieces(rows, is_out=True):
            self.move(piece, self.pool, self.held)

    def fetch(self, rows: NewPages) -> None:
        """Copy in [m, :class:`.FetchRow`]."""
        for piece in self.pieces(rows, is_out=False):
            self.move(piece, self.held, self.pool)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.move(Piece(copy.group, copy.source, copy.target, 1), self.pool, self.pool)

    def pieces(self, rows: NewPages, *, is_out: bool) -> list[Piece]:
        """Return the pieces that :meth:`offload`, or else :meth:`fetch`, copies for these rows."""
        return list(self._pieces(rows, is_out=is_out)) if len(rows) else []

    def move_parts(
        self, pieces: Sequence[Piece], parts: Mapping[int, Part], *, is_out: bool
    ) -> None:
        """Copy a part of each page; only for a pool in host memory.

        :param parts: the part by group; pages of other groups are left out.
        """
        for piece in pieces:
            if piece.group in parts:
                begin, end = parts[piece.group]
                memories = (self.pool, self.held) if is_out else (self.held, self.pool)
                source, target = (self._pages(memory, piece.group) for memory in memories)
                np.copyto(
                    target[piece.target : piece.target + piece.count, begin:end],
                    source[piece.source : piece.source + piece.count, begin:end],
                )

    def _pieces(self, rows: NewPages, *, is_out: bool) -> Iterator[Piece]:
        columns = OffloadRow if is_out else FetchRow
        groups, pages, held = (rows[:, n] for n in (columns.GROUP, columns.PAGE, columns.HELD))
        for index in np.unique(groups).tolist():
            in_group = groups == index
            here = pages[in_group]
            order = np.argsort(here, kind="stable")
            here, there = here[order], held[in_group][order]
            for start, count in runs(here, there):
                first, other = int(here[start]), int(there[start])
                yield Piece(index, *((first, other) if is_out else (other, first)), count)

    def move(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages; on a GPU the caller does not wait for it."""
        stride_bytes = self.layout.groups[piece.group].page_stride_bytes
        size_bytes = piece.count * stride_bytes
        read, written = (
            memory[first * stride_bytes :][:size_bytes]
            for memory, first in ((source, piece.source), (target, piece.target))
        )
        if self._in_host:
            np.copyto(written.numpy(), read.numpy())
        else:
            written.copy_(read, non_blocking=True)

    def _pages(self, memory: torch.Tensor, group: int) -> Bytes:
        """Return host memory as pages of a group, uint8 [pages, stride]."""
        stride_bytes = self.layout.groups[group].page_stride_bytes
        whole: Bytes = memory[: memory.numel() // stride_bytes * stride_bytes].numpy()
        return whole.reshape(-1, stride_bytes)

    @property
    def held(self) -> torch.Tensor:
        if self.buffer is None:
            raise RuntimeError("a plan moves pages to or from a CPU buffer that is not there")
        return self.buffer
