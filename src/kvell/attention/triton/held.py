"""Batches and work in memory that is filled again for each step, for captured launches.

A captured launch keeps its pointers and its grid, so both follow from capacities; how many items
there are is read from memory by the kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from kvell.attention.interface import GroupBatch
from kvell.attention.triton.work import HEADER_INTS, ITEM, Tiling, Work

PROGRAMS_PER_PROCESSOR = 3
"""Programs of ``attend_sections`` that run on a multiprocessor together, by their registers."""

INTERPRETED_PROGRAMS = 3
"""Programs in the interpreter: so few that each takes several items."""


@dataclass(frozen=True)
class Capacity:
    """Limits of the work of one step.

    :param items: sections of all short tiles.
    :param tiles: short tiles: at most one for each new token.
    :param tile_tokens: new tokens of a tile: 1 if every request has one, else the tiling's.
    """

    items: int
    tiles: int
    tile_tokens: int

    @property
    def num_ints(self) -> int:
        return HEADER_INTS + self.items * len(ITEM)


def most_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def held_work(flat: torch.Tensor, capacity: Capacity, programs: int) -> Work:
    """Return work that lies in ``flat``: what ``fill_items`` writes, copied to the device.

    :param flat: int32 [``capacity.num_ints``], aligned to 16 bytes.
    :param programs: the limit of the launch's programs; see ``most_programs``.
    :raises ValueError: if ``flat`` has another length, dtype or alignment.
    """
    if (flat.shape, flat.dtype) != ((capacity.num_ints,), torch.int32):
        raise ValueError(
            f"flat: {flat.dtype} {list(flat.shape)}; needs int32 [{capacity.num_ints}]"
        )
    if flat.storage_offset() * flat.itemsize % 16:
        raise ValueError("flat: not aligned to 16 bytes; move it")
    work = Work.over(flat, capacity.items, capacity.tiles, capacity.tile_tokens)
    return replace(work, most_programs=programs)


@dataclass(frozen=True, eq=False)
class HeldGroupBatch(GroupBatch):
    """A batch whose tensors lie in memory that is filled again for each step.

    Its requests have at most ``work.SHORT_TOKENS`` new tokens.  A launch for it allocates nothing
    but its output, reads nothing on the host, and needs ``TritonKernels.reserve`` beforehand.

    Query rows that no item covers are *pads*.  Their page is -1, so nothing is written for them.
    Their output rows are not written either, and hold anything.

    :param works: the work of each tiling of the group's layers.
    """

    works: Mapping[Tiling, Work] = field(kw_only=True)

    def work(self, tiling: Tiling) -> Work:
        """Return the work of a tiling.

        :raises ValueError: if the batch has none.
        """
        work = self.works.get(tiling)
        if work is None:
            raise ValueError(f"works: none for {tiling}; the batch has {list(self.works)}")
        return work
