"""Construction of an engine's memory: the KV region, activations, and the CPU buffer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvell.byte_sizes import typed_bytes
from kvell.cost.prices import InstancePrices
from kvell.cost.swap_rule import rule_of_prices, rule_of_weights
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
from kvell.memory import Layout, MemoryCore, WithholdingCore
from kvell.mempool.transports.neighbours import MappedPeers
from kvell.mempool.transports.places import MOST_NEIGHBOURS
from kvell.models.forward.kv_memory import host_pool, pool_tensor
from kvell.models.fused.decoder import FusedDecoder
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB


@dataclass(frozen=True)
class Memory:
    """An engine's memory.

    :param pool: uint8 [bytes], the KV region.
    :param chunks: the pool's chunks, if the first touch commits them.
    :param descriptor: the pool's memfd, if it has one that nothing else uses.
    :param neighbours: mapping slots after the pool for pools of other instances on this host.
    :param seen: uint8 [bytes], the pool and the slots after it, for attention and for reads of page
        copies.
    """

    pool: torch.Tensor
    steps: SharedMemory | None = None
    slot_memory: SlotMemory | None = None
    warmer: Warmer | None = None
    chunks: ChunkDevice | None = None
    descriptor: int | None = None
    neighbours: MappedPeers | None = None
    seen: torch.Tensor | None = None

    @property
    def read(self) -> torch.Tensor:
        """The memory that pages are read from: the pool, with any slots for other pools."""
        return self.pool if self.seen is None else self.seen


@dataclass(frozen=True)
class CpuBuffer:
    """The CPU buffer's host memory, and the policies that use it.

    :param memory: uint8 [bytes].
    :param parking: policy that runs prompts before decodes; None without objectives.
    """

    swapping: Swapping
    memory: torch.Tensor
    parking: Parking | None = None


def cpu_buffer_of(
    core: MemoryCore,
    every: Sequence[PagedModel],
    options: EngineOptions,
    limits: Limits,
    prices: InstancePrices,
) -> CpuBuffer | None:
    """Build the CPU buffer, in whole large pages; return None if none is configured.

    :raises ChangeSomething: if it holds no large page, or the host lacks the memory.
    """
    if options.cpu_buffer_bytes is None:
        return None
    layout = core.layout
    count = options.cpu_buffer_bytes // layout.large_page_bytes
    if not count:
        raise ChangeSomething(
            "--cpu-buffer",
            typed_bytes(options.cpu_buffer_bytes),
            f"is less than a large page of the pool: {layout.large_page_bytes} bytes",
            f"use at least --cpu-buffer {-(-layout.large_page_bytes // MIB)}MiB",
        )
    size_bytes = count * layout.large_page_bytes
    device = every[0].device.type
    weights = sum(model.weight_bytes // model.dtype.itemsize for model in every)
    ledger = PageBuffer(layout.groups, count)
    rule = rule_of_prices(prices) or rule_of_weights(weights, device)
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
    sizes: Sizes, core: WithholdingCore, every: Sequence[PagedModel], options: EngineOptions
) -> Memory:
    """Build the pool, and activation memory in it or separately.

    Models are not attached yet, but fused passes have their activation memory.
    """
    layout, place = sizes.layout, every[0].device
    decoders = [model.fused for model in every if model.fused]
    if not sizes.shared_chunks:
        _give_reserve(decoders, sizes.reserve_bytes)
        if place.type != "cpu":
            return Memory(pool_tensor(None, layout.pool_bytes, place))
        return _own_pool(layout, place, options)
    device, num_slots = _chunks(sizes.shared_chunks, "--memory", layout, options)
    shared = share_pool(device, layout, core, sizes.need, options.kv_memory_bytes)
    area = host_pool(device.view(shared.elastic.area))
    memory = Memory(
        pool_tensor(device.view(device.home), layout.pool_bytes, place),
        shared.steps,
        SlotMemory(area, device.chunk_bytes, decoders),
        shared.warmer(),
        descriptor=device.descriptor,
    )
    return _with_neighbours(memory, device, layout, num_slots)


def _own_pool(layout: Layout, place: torch.device, options: EngineOptions) -> Memory:
    """Build a pool in host memory that holds KV alone."""
    num_chunks = -(-layout.pool_bytes // HostChunks.chunk_bytes)
    cold, num_slots = _chunks(num_chunks, "--kv-memory", layout, options)
    pool = pool_tensor(cold.view(cold.home), layout.pool_bytes, place)
    memory = Memory(pool, chunks=cold, descriptor=cold.descriptor)
    return _with_neighbours(memory, cold, layout, num_slots)


def _chunks(
    num_chunks: int, flag: str, layout: Layout, options: EngineOptions
) -> tuple[HostChunks, int]:
    """Return chunks, followed by mapping slots if there are other instances, and their number."""
    num_slots = MOST_NEIGHBOURS if options.pool_place is not None else 0
    beyond_bytes = MappedPeers.beyond_bytes(layout.pool_bytes, layout.large_page_bytes, num_slots)
    try:
        return HostChunks(num_chunks, flag, beyond_bytes), num_slots
    except ChangeSomething:
        if not num_slots:
            raise
        # With few addresses (ulimit -v) it serves without borrowing.
        return HostChunks(num_chunks, flag), 0


def _with_neighbours(memory: Memory, device: HostChunks, layout: Layout, num_slots: int) -> Memory:
    if not num_slots:
        return memory
    neighbours = MappedPeers(device, layout.pool_bytes, layout.large_page_bytes)
    return replace(memory, neighbours=neighbours, seen=host_pool(device.view_beyond()))


def _give_reserve(decoders: Sequence[FusedDecoder], reserve_bytes: int) -> None:
    """Allocate the reserve of fused passes; a step's first touch commits its memory."""
    if decoders:
        buffer = torch.empty(reserve_bytes, dtype=torch.uint8)
        for decoder in decoders:
            decoder.use_memory(buffer)
