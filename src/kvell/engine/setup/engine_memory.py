"""An engine's memory: the KV region, and where activations are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvell.cost.swap_rule import rule_of_weights
from kvell.device.chunks import ChunkDevice
from kvell.device.host import HostPool
from kvell.device.host_chunks import HostChunks
from kvell.elastic.logical_buffer import CpuBuffer as LogicalBuffer
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.requests.limits import Limits
from kvell.engine.running.slot_memory import SlotMemory
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sharing import share_pool
from kvell.engine.setup.sizes import Sizes
from kvell.engine.setup.warmer import Warmer
from kvell.errors import ChangeSomething
from kvell.memory import LendingCore, MemoryCore
from kvell.models.forward.kv_memory import host_pool, pool_tensor
from kvell.models.fused.decoder import FusedDecoder
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB


@dataclass(frozen=True)
class Memory:
    """An engine's memory, as each of its parts sees it.

    :param pool: uint8 [bytes], the KV region.
    :param chunks: behind the pool, where nothing but a first touch puts memory there.
    """

    pool: torch.Tensor
    steps: SharedMemory | None = None
    lends: SlotMemory | None = None
    warmer: Warmer | None = None
    chunks: ChunkDevice | None = None


@dataclass(frozen=True)
class CpuBuffer:
    """Host memory beside the pool, and who decides what goes there.

    :param memory: uint8 [bytes].
    :param parking: lets prompts go ahead of decodes, if anybody may be late.
    """

    swapping: Swapping
    memory: torch.Tensor
    parking: Parking | None = None


def cpu_buffer_of(
    core: MemoryCore, every: Sequence[PagedModel], options: EngineOptions, limits: Limits
) -> CpuBuffer | None:
    """The CPU buffer, in whole large pages; None without one.

    :raises ChangeSomething: if it would not hold one large page, or the host has not so much.
    """
    if options.cpu_buffer_bytes is None:
        return None
    layout = core.layout
    count = options.cpu_buffer_bytes // layout.large_page_bytes
    if not count:
        raise ChangeSomething(
            "--cpu-buffer",
            f"{options.cpu_buffer_bytes}B",
            f"is less than a large page of the pool: {layout.large_page_bytes} bytes",
            f"use at least --cpu-buffer {-(-layout.large_page_bytes // MIB)}MiB",
        )
    size_bytes, device = count * layout.large_page_bytes, every[0].device.type
    weights = sum(one.weight_bytes // one.dtype.itemsize for one in every)
    ledger, rule = PageBuffer(layout.groups, count), rule_of_weights(weights, device)
    swapping = Swapping(core, ledger, rule, BufferedPrefixes(core, ledger, rule))
    parking = None
    if options.has_objectives:
        parking = Parking(core, swapping, LogicalBuffer(count), limits.min_chunk_tokens)
    if device == "cuda":
        memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    else:
        memory = host_pool(HostPool(size_bytes, "--cpu-buffer").buffer())[:size_bytes]
    return CpuBuffer(swapping, memory, parking)


def memory_of(
    sizes: Sizes, core: LendingCore, every: Sequence[PagedModel], options: EngineOptions
) -> Memory:
    """The pool, and activations in it or beside it; nothing is attached to models yet, but
    where their compiled passes compute."""
    layout, place = sizes.layout, every[0].device
    decoders = [one.fused for one in every if one.fused]
    if not sizes.shared_chunks:
        _lend_reserve(decoders, sizes.reserve_bytes)
        if place.type != "cpu":
            return Memory(pool_tensor(None, layout.pool_bytes, place))
        cold = HostChunks(-(-layout.pool_bytes // HostChunks.chunk_bytes), "--kv-memory")
        pool = pool_tensor(cold.view(cold.home), layout.pool_bytes, place)
        return Memory(pool, chunks=cold)
    device = HostChunks(sizes.shared_chunks)
    shared = share_pool(device, layout, core, sizes.need, options.kv_memory_bytes)
    area = host_pool(device.view(shared.elastic.area))
    return Memory(
        pool_tensor(device.view(device.home), layout.pool_bytes, place),
        shared.steps,
        SlotMemory(area, device.chunk_bytes, decoders),
        shared.warmer(),
    )


def _lend_reserve(decoders: Sequence[FusedDecoder], reserve_bytes: int) -> None:
    """The arena's memory for fused passes; committed where a step first touches it."""
    if decoders:
        buffer = torch.empty(reserve_bytes, dtype=torch.uint8)
        for decoder in decoders:
            decoder.use_memory(buffer)
