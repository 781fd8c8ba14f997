"""Kernels that read their work from memory: what a model's layers need of it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from kvell.attention.interface import GroupBatch, HostLengths
from kvell.attention.triton.held import HeldGroupBatch
from kvell.attention.triton.work import Tiling
from kvell.models.captured.device_step import DeviceMemory, Forward, batch_of, compute
from kvell.models.captured.slots import DecodeRows, Places, fill
from kvell.models.forward.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from kvell.attention.triton.launch import ScratchSize


@runtime_checkable
class WorkInMemory(Protocol):
    """Kernels whose launches are the same for any work in the same memory."""

    def tilings(self, batch: GroupBatch) -> tuple[Tiling, ...]:
        """Return the tilings of the layers that have attended over one of the latest batches."""
        ...

    def scratch_size(self, batches: Iterable[HeldGroupBatch]) -> "ScratchSize":
        """Return the memory that launches over these batches need."""
        ...

    def reserve(self, size: "ScratchSize", device: torch.device) -> None:
        """Allocate it."""
        ...


def tilings_of(
    kernels: WorkInMemory, forward: Forward, places: Places, device: torch.device
) -> list[Sequence[Tiling]]:
    """Compute a step of pads alone; return the tilings of each group's layers."""
    memory = DeviceMemory.zeros(places.size, 0, device)
    slot = np.zeros(places.size, np.int32)
    fill(slot, places, DecodeRows.none(places.groups), 0)
    memory.put(torch.from_numpy(slot))
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
