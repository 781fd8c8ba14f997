"""An engine's memory: the KV region, and where activations are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvell.device.host import HostPool
from kvell.device.host_chunks import HostChunks
from kvell.engine.options import EngineOptions
from kvell.engine.sharing import share_pool
from kvell.engine.sizes import Sizes
from kvell.engine.slot_memory import SlotMemory
from kvell.engine.step_memory import SharedMemory
from kvell.engine.warmer import Warmer
from kvell.memory import LendingCore
from kvell.models.kv_memory import host_pool, pool_tensor
from kvell.models.lean.decoder import LeanDecoder
from kvell.models.paged_model import PagedModel


@dataclass(frozen=True)
class Memory:
    """An engine's memory, as each of its parts sees it.

    :param pool: uint8 [bytes], the KV region.
    """

    pool: torch.Tensor
    steps: SharedMemory | None = None
    lends: SlotMemory | None = None
    warmer: Warmer | None = None


def memory_of(
    sizes: Sizes, core: LendingCore, every: Sequence[PagedModel], options: EngineOptions
) -> Memory:
    """The pool, and activations in it or beside it; nothing is attached to models yet, but
    where their compiled passes compute."""
    layout, place = sizes.layout, every[0].device
    decoders = [one.lean for one in every if one.lean]
    if not sizes.shared_chunks:
        buffer = HostPool(layout.pool_bytes).buffer() if place.type == "cpu" else None
        _lend_reserve(decoders, sizes.reserve_bytes)
        return Memory(pool_tensor(buffer, layout.pool_bytes, place))
    device = HostChunks(sizes.shared_chunks)
    shared = share_pool(device, layout, core, sizes.need, options.kv_memory_bytes)
    area = host_pool(device.view(shared.elastic.area))
    return Memory(
        pool_tensor(device.view(device.home), layout.pool_bytes, place),
        shared.steps,
        SlotMemory(area, device.chunk_bytes, decoders),
        shared.warmer(),
    )


def _lend_reserve(decoders: Sequence[LeanDecoder], reserve_bytes: int) -> None:
    """The arena's memory, in which lean passes compute; committed where a step first touches it."""
    if decoders:
        buffer = torch.empty(reserve_bytes, dtype=torch.uint8)
        for decoder in decoders:
            decoder.use_memory(buffer)
