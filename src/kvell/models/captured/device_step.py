"""The operations of a recorded step, over device memory that is filled again for each step."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvell.attention.interface import GroupBatch
from kvell.attention.triton.held import HeldGroupBatch, held_work, most_programs
from kvell.models.captured.graphs import Outputs
from kvell.models.captured.slots import GroupPlaces, Places, StatePlaces
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.models.states.scan_plan import DecodeStateBatch
from kvell.vocabulary import NOT_NUMBERS

Forward = Callable[[ForwardBatch], torch.Tensor]
"""Computes a step's logits, float32 [rows, vocab]."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of steps on the device.

    :param arena: int32, a slot's numbers.
    :param last: int32 [seats + 1], the last token of each seat; the last one is no seat's.
    """

    arena: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def zeros(numbers: int, seats: int, device: torch.device) -> "DeviceMemory":
        sizes = numbers, seats + 1
        return DeviceMemory(*(torch.zeros(n, dtype=torch.int32, device=device) for n in sizes))


def batch_of(memory: DeviceMemory, places: Places) -> ForwardBatch:
    arena, rows = memory.arena, places.rows
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=arena.device)
    groups: list[GroupBatch | DecodeStateBatch | None] = []
    for group in places.groups:
        if isinstance(group, StatePlaces):
            pages = arena[group.page_ids].view(rows, group.slices)
            groups.append(DecodeStateBatch.of_decodes(pages))
        elif isinstance(group, GroupPlaces):
            groups.append(_group_batch(arena, group, numbers, places.page_ids))
        else:
            groups.append(None)
    ids = numbers[:rows].long()
    return ForwardBatch(ids, ids, tuple(groups), ids)


@torch.inference_mode()
def compute(memory: DeviceMemory, places: Places, batch: ForwardBatch, forward: Forward) -> Outputs:
    arena, last = memory.arena, memory.last
    sources = arena[places.sources]
    kept = last.index_select(0, sources.clamp_min(0))
    ids = torch.where(sources >= 0, kept, arena[places.literals])
    positions = arena[places.positions].long()
    logits = forward(replace(batch, token_ids=ids.long(), positions=positions))
    tokens = first_largest(logits).int()
    last.index_copy_(0, arena[places.targets].long(), tokens.clamp_min(0))
    return logits, tokens


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [rows], the index of a largest logit, or NOT_NUMBERS; nothing is waited for.

    The argmax of a row with NaN is a NaN, so a check of the largest number detects any.
    """
    first = logits.argmax(-1)
    values = logits.gather(-1, first[..., None])[..., 0]
    return torch.where(values.isfinite(), first, NOT_NUMBERS)


def _group_batch(
    arena: torch.Tensor, group: GroupPlaces, numbers: torch.Tensor, page_ids: slice
) -> GroupBatch:
    programs = most_programs(arena.device) if group.works else 0
    works = {
        work.tiling: held_work(arena[work.numbers], work.capacity, programs) for work in group.works
    }
    parts = (
        numbers,
        arena[group.context_lens],
        arena[group.table_starts],
        arena[page_ids],
        arena[group.first_positions],
        arena[group.write_page_ids],
        arena[group.write_offsets],
    )
    return HeldGroupBatch(*parts, works=works) if works else GroupBatch(*parts)
