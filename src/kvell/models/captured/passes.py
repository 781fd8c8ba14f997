"""Decode steps of a model, recorded once for each size and then repeated.

::

    host     fill a slot ─► upload ─────► replay ──────────────► download tokens
    device                  slot's range │ ids ◄ last token of each seat, or the slot's
                                         │ layers ─► logits ─► first largest ─► last token of seats

A record sees only memory that stays where it is: the slot's range, the pool, the weights and the
last tokens.  So its Python runs once, whatever the number of layers.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from kvell.attention.interface import GroupBatch, HostLengths
from kvell.attention.triton.held import HeldGroupBatch
from kvell.attention.triton.work import Tiling
from kvell.models.captured.device_step import DeviceMemory, Forward, batch_of, compute
from kvell.models.captured.graphs import Graph, Graphs, Mark
from kvell.models.captured.slots import (
    DecodeRows,
    Places,
    SlotFullError,
    SlotLimits,
    fill,
    places_of,
    spare_pages,
)
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.pages.layout import GroupSpec

if TYPE_CHECKING:
    from kvell.attention.triton.launch import ScratchSize

logger = logging.getLogger(__name__)

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
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None


@runtime_checkable
class WorkInMemory(Protocol):
    """Kernels whose launches are the same for any work in the same memory."""

    def tilings(self, batch: GroupBatch) -> tuple[Tiling, ...]:
        """Return the tilings of the layers that have attended over one of the latest batches."""
        ...

    def scratch_size(self, batches: Iterable[HeldGroupBatch]) -> "ScratchSize":
        """Return the memory that launches over these batches need."""
        ...

    def reserve(self, size: "ScratchSize", device: torch.device) -> None: ...


def tilings_of(
    kernels: WorkInMemory, forward: Forward, places: Places, device: torch.device
) -> list[Sequence[Tiling]]:
    memory = DeviceMemory.zeros(places.size, 0, device)
    slot = np.zeros(places.size, np.int32)
    fill(slot, places, DecodeRows.none(places.groups), 0)
    memory.arena.copy_(torch.from_numpy(slot))
    batch = batch_of(memory, places)
    groups = tuple(
        replace(group, host=_lengths(places.rows)) if isinstance(group, GroupBatch) else group
        for group in batch.groups
    )
    compute(memory, places, replace(batch, groups=groups), forward)
    return [kernels.tilings(group) if isinstance(group, GroupBatch) else () for group in groups]


def reserve(kernels: WorkInMemory, batches: Iterable[ForwardBatch], device: torch.device) -> None:
    groups = [group for batch in batches for group in batch.groups]
    held = [group for group in groups if isinstance(group, HeldGroupBatch)]
    kernels.reserve(kernels.scratch_size(held), device)


def _lengths(rows: int) -> HostLengths:
    nothing = torch.zeros(rows, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    return HostLengths(starts, nothing, torch.zeros_like(starts), nothing)


SLOTS = 3
"""Copies on the host: one is filled, one is read by the device, one may still be read."""


@dataclass
class _Slot:
    """A copy on the host: pinned memory, and the place behind its last upload."""

    memory: torch.Tensor
    tokens: torch.Tensor
    read: Mark | None = None


@dataclass(eq=False)
class SlotStep:
    """A step that waits in a slot, or was launched.

    :ivar rows: rows of requests; those behind them are pads.
    :ivar used: parts of the slot that the device needs.
    :ivar takes_seats: whether the device knows the tokens that the previous step draws.
    """

    rows: int
    places: Places
    slot: _Slot
    used: list[slice]
    takes_seats: bool
    done: Mark | None = None

    def put_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        self.slot.memory.numpy()[self.places.literals][list(rows)] = token_ids

    def wait(self) -> None:
        assert self.done is not None, "the step was not launched"
        self.done.synchronize()

    def tokens(self) -> list[int]:
        """Wait for the step; return the first largest of each row's logits, or NOT_NUMBERS."""
        self.wait()
        tokens: list[int] = self.slot.tokens[: self.rows].tolist()
        return tokens


class StepRecords:
    """The recorded steps of one model.

    :param forward: the model's pass, over attached memory.
    :param groups: the model's groups in its order; None for one without text tokens.
    :param pool: the pool's memory, uint8 [bytes], with a large page behind ``pool_bytes`` for pads.
    :param kernels: the pass's, which may read their work from memory (:class:`WorkInMemory`).
    :param seats: requests whose last token stays on the device.
    :ivar has_failed: whether the device could not record a step; then none is recorded any more.
    :ivar counts: steps so far: ``RECORDED``, or by the reason why they were computed.
    """

    def __init__(
        self,
        forward: Forward,
        groups: Sequence[GroupSpec | None],
        graphs: Graphs,
        pool: torch.Tensor,
        pool_bytes: int,
        limits: SlotLimits,
        kernels: object = None,
        seats: int = 0,
    ) -> None:
        self._forward, self.graphs, self.num_seats = forward, graphs, seats
        self._limits = limits
        self.counts = Counter[str]()
        self.has_failed = False
        self._sizes = bucket_sizes(limits.rows)
        place = partial(places_of, groups=groups, limits=limits)
        spares = spare_pages(groups, pool, pool_bytes)
        tilings: Sequence[Sequence[Tiling]] = ()
        if isinstance(kernels, WorkInMemory):
            tilings = tilings_of(kernels, forward, place(1, spares=spares), pool.device)
        self._places = {rows: place(rows, spares=spares, tilings=tilings) for rows in self._sizes}
        largest = max(places.size for places in self._places.values())
        self._memory = DeviceMemory.zeros(largest, seats, pool.device)
        self._batches = {
            rows: batch_of(self._memory, places) for rows, places in self._places.items()
        }
        if isinstance(kernels, WorkInMemory):
            reserve(kernels, self._batches.values(), pool.device)
        self.slots = [
            _Slot(graphs.pinned_memory(largest), graphs.pinned_memory(self._sizes[-1]))
            for _ in range(SLOTS)
        ]
        self._records: dict[int, Graph] = {}
        self._turn = 0

    def step(self, decode: DecodeRows) -> SlotStep | None:
        """Fill the next slot, once the device has read what was there; None if it has no room."""
        rows = len(decode.token_ids)
        size = smallest(self._sizes, rows)
        if size is None or decode.num_pages > self._limits.page_ids:
            return None
        places, slot = self._places[size], self.slots[self._turn]
        if slot.read is not None:
            slot.read.synchronize()
        try:
            used = fill(slot.memory.numpy(), places, decode, self.num_seats)
        except SlotFullError:
            return None
        self._turn = (self._turn + 1) % SLOTS
        return SlotStep(rows, places, slot, used, decode.sources is not None)

    def launch(self, step: SlotStep) -> torch.Tensor:
        """Compute a step; return its logits, float32 [rows, vocab].

        The next step overwrites them.
        """
        record = self._record(step.places)
        graphs, slot = self.graphs, step.slot
        for part in step.used:
            graphs.upload(self._memory.arena[part], slot.memory[part])
        slot.read = graphs.mark()
        record.replay()
        logits, tokens = record.outputs
        graphs.download(slot.tokens[: step.rows], tokens[: step.rows])
        step.done = graphs.mark()
        return logits[: step.rows]

    def record_all(self) -> None:
        """Record every size, the largest first: the others fit its memory.

        A model that the device cannot record is computed by its Python, as before.
        """
        try:
            for size in reversed(self._sizes):
                self._record(self._places[size])
        except RuntimeError as error:
            self.has_failed = True
            logger.warning("decode steps are not recorded, so each takes longer: %s", error)

    def _record(self, places: Places) -> Graph:
        record = self._records.get(places.rows)
        if record is None:
            slot = np.zeros(places.size, np.int32)
            fill(slot, places, DecodeRows.none(places.groups), self.num_seats)
            memory, forward = self._memory, self._forward
            self.graphs.follow()
            memory.arena[: places.size].copy_(torch.from_numpy(slot))
            batch = self._batches[places.rows]
            record = self.graphs.record(lambda: compute(memory, places, batch, forward))
            self._records[places.rows] = record
        return record
