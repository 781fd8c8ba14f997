"""Moves the bytes of pages: within the pool, out to the CPU buffer, and back in.

On a GPU the copies run on the stream on which the step computes, and the buffer is pinned: pages
that a plan copies out are complete before a later plan copies them in, and no thread waits.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.memory import Layout, SlotTable
from kvell.runs import runs


class PageMover:
    """Carries out the copies of plans.

    :param pool: uint8 [bytes], on the models' device.
    :param buffer: uint8 [bytes], host memory; None if plans offload nothing.
    """

    def __init__(
        self, layout: Layout, slots: SlotTable, pool: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        self._layout, self._slots, self._pool, self._buffer = layout, slots, pool, buffer

    def offload(self, rows: NewPages) -> None:
        """Copy out [m, 3]: group, page, page of the buffer."""
        if len(rows):
            self._move(rows[:, 0], rows[:, 1], rows[:, 2], is_out=True)

    def fetch(self, rows: NewPages) -> None:
        """Copy in [m, 3]: group, page of the buffer, page."""
        if len(rows):
            self._move(rows[:, 0], rows[:, 2], rows[:, 1], is_out=False)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages onto others of their groups, in order."""
        for copy in copies:
            group = self._layout.groups[copy.group]
            pages = np.asarray([copy.source, copy.target], np.int32)
            source, target = (
                int(page) * group.page_stride_bytes
                for page in self._slots.physical(pages, group.pages_per_large)
            )
            size = group.page_stride_bytes
            self._pool[target : target + size].copy_(self._pool[source : source + size])

    def _move(self, groups: NewPages, pages: NewPages, held: NewPages, *, is_out: bool) -> None:
        if self._buffer is None:
            raise RuntimeError("a plan moves pages to or from a CPU buffer that is not there")
        for index in np.unique(groups).tolist():
            group, own = self._layout.groups[index], groups == index
            here = self._slots.physical(pages[own], group.pages_per_large)
            order = np.argsort(here, kind="stable")
            here, buffered = here[order], held[own][order]
            for start, count in runs(here, buffered):
                begin, there = int(here[start]), int(buffered[start])
                stride, size = group.page_stride_bytes, count * group.page_stride_bytes
                pool = self._pool[begin * stride :][:size]
                buffer = self._buffer[there * stride :][:size]
                target, source = (buffer, pool) if is_out else (pool, buffer)
                target.copy_(source, non_blocking=True)
