"""Construction of an engine's memory: the KV region, activations, and the CPU buffer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvell.byte_sizes import typed_bytes
from kvell.cost.prices import InstancePrices
from kvell.cost.swap_rule import rule_of_prices, rule_of_weights
from kvell.device.chunks import ChunkDevice
from kvell.device.host import CHUNK_BYTES
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
from kvell.errors import ChangeSomething, TryLater
from kvell.memory import Layout, MemoryCore, WithholdingCore
from kvell.mempool.transports.neighbours import MOST_NEIGHBOURS, MappedPeers
from kvell.models.forward.kv_memory import host_pool, pool_tensor
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB


@dataclass(frozen=True)
class Memory:
    """An engine's memory.

    :param pool: uint8 [bytes], the KV region.
    :param chunks: the pool's chunks, if the first touch commits them.
    :param descriptor: the pool's memfd, if it has one that nothing else uses.
    :param neighbours: mapping slots after the pool for pools of other instances on this host.
    :param seen: uint8 [bytes], the pool and what is after it, for attention and for reads of page
        copies.
    :param buffer: the CPU buffer after the pool, if the pool is host memory.
    """

    pool: torch.Tensor
    steps: SharedMemory | None = None
    slot_memory: SlotMemory | None = None
    warmer: Warmer | None = None
    chunks: ChunkDevice | None = None
    descriptor: int | None = None
    neighbours: MappedPeers | None = None
    seen: torch.Tensor | None = None
    buffer: "BufferRegion | None" = None

    @property
    def read(self) -> torch.Tensor:
        """The memory that pages are read from: the pool, with the CPU buffer and any slots for
        other pools."""
        return self.pool if self.seen is None else self.seen

    @property
    def offered(self) -> torch.Tensor:
        if self.buffer is None or self.seen is None:
            return self.pool
        return self.seen[: self.buffer.end_bytes]

    @property
    def buffer_memory(self) -> torch.Tensor | None:
        """The CPU buffer after the pool, uint8 [bytes]."""
        if self.buffer is None or self.seen is None:
            return None
        return self.seen[self.buffer.at_bytes : self.buffer.end_bytes]


@dataclass(frozen=True)
class BufferRegion:
    """The place of the CPU buffer after a pool in host memory, in the same file.

    :param at_bytes: its distance from the pool's first byte: whole large pages, so that their
        numbers continue after the pool's, and whole chunks.
    :param count: number of its large pages.
    """

    at_bytes: int
    count: int
    large_page_bytes: int

    @classmethod
    def after(cls, num_chunks: int, count: int, large_page_bytes: int) -> "BufferRegion":
        """Return the region of ``count`` large pages after a pool of chunks."""
        unit = math.lcm(large_page_bytes, CHUNK_BYTES)
        at_bytes = -(-num_chunks * CHUNK_BYTES // unit) * unit
        return cls(at_bytes, count, large_page_bytes)

    @property
    def end_bytes(self) -> int:
        return self.at_bytes + self.count * self.large_page_bytes

    @property
    def first_large(self) -> int:
        """The number of its first large page, counted from the pool's first."""
        return self.at_bytes // self.large_page_bytes


@dataclass(frozen=True)
class CpuBuffer:
    """The CPU buffer's host memory, and the policies that use it.

    :param memory: uint8 [bytes].
    :param parking: policy that runs prompts before decodes; None without objectives.
    :param first_large: number of its first large page, counted from the pool's first, if passes
        can write there; None: they cannot.
    """

    swapping: Swapping
    memory: torch.Tensor
    parking: Parking | None = None
    first_large: int | None = None


def _buffer_larges(layout: Layout, options: EngineOptions) -> int:
    """Return the number of the CPU buffer's large pages; 0 if none is configured.

    :raises ChangeSomething: if it is smaller than one.
    """
    if options.cpu_buffer_bytes is None:
        return 0
    count = options.cpu_buffer_bytes // layout.large_page_bytes
    if not count:
        raise ChangeSomething(
            "--cpu-buffer",
            typed_bytes(options.cpu_buffer_bytes),
            f"is less than a large page of the pool: {layout.large_page_bytes} bytes",
            f"use at least --cpu-buffer {-(-layout.large_page_bytes // MIB)}MiB",
        )
    return count


def cpu_buffer_of(
    core: MemoryCore,
    memory: Memory,
    every: Sequence[PagedModel],
    options: EngineOptions,
    limits: Limits,
    prices: InstancePrices,
) -> CpuBuffer | None:
    """Build the CPU buffer, in whole large pages; return None if none is configured."""
    layout = core.layout
    count = _buffer_larges(layout, options)
    if not count:
        return None
    device = every[0].device.type
    weights = sum(model.weight_bytes // model.dtype.itemsize for model in every)
    ledger = PageBuffer(layout.groups, count)
    rule = rule_of_prices(prices) or rule_of_weights(weights, device)
    swapping = Swapping(core, ledger, rule, BufferedPrefixes(core, ledger, rule))
    parking = None
    if options.has_objectives:
        parking = Parking(core, swapping, LogicalBuffer(count), limits.min_chunk_tokens)
    if memory.buffer is None or memory.buffer_memory is None:
        size_bytes = count * layout.large_page_bytes
        pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
        return CpuBuffer(swapping, pinned, parking)
    return CpuBuffer(swapping, memory.buffer_memory, parking, memory.buffer.first_large)


def memory_of(
    sizes: Sizes,
    core: WithholdingCore,
    every: Sequence[PagedModel],
    options: EngineOptions,
    spare_bytes: int = 0,
) -> Memory:
    """Build the pool, and activation memory in it or separately.

    Models are not attached yet, but fused passes have their activation memory.

    :param spare_bytes: behind the pool, for what recorded steps write of their pads.
    """
    layout, place = sizes.layout, every[0].device
    decoders = [model.fused for model in every if model.fused]
    if not sizes.shared_chunks:
        if decoders:  # a step's first touch commits the reserve's memory
            reserve = torch.empty(sizes.reserve_bytes, dtype=torch.uint8)
            for decoder in decoders:
                decoder.use_memory(reserve)
        if place.type != "cpu":
            return Memory(pool_tensor(None, layout.pool_bytes + spare_bytes, place))
        return _own_pool(layout, place, options, spare_bytes)
    device, num_slots, buffer = _chunks(sizes.shared_chunks, "--memory", layout, options)
    shared = share_pool(device, layout, core, sizes.need, options.kv_memory_bytes)
    area = host_pool(device.view(shared.elastic.area))
    memory = Memory(
        pool_tensor(device.view(device.home), layout.pool_bytes, place),
        shared.steps,
        SlotMemory(area, device.chunk_bytes, decoders),
        shared.warmer(),
        descriptor=device.descriptor,
        buffer=buffer,
    )
    return _with_beyond(memory, device, layout, num_slots)


def _own_pool(
    layout: Layout, place: torch.device, options: EngineOptions, spare_bytes: int
) -> Memory:
    num_bytes = layout.pool_bytes + spare_bytes
    num_chunks = -(-num_bytes // HostChunks.chunk_bytes)
    cold, num_slots, buffer = _chunks(num_chunks, "--kv-memory", layout, options)
    pool = pool_tensor(cold.view(cold.home), num_bytes, place)
    memory = Memory(pool, chunks=cold, descriptor=cold.descriptor, buffer=buffer)
    return _with_beyond(memory, cold, layout, num_slots)


def _chunks(
    num_chunks: int, flag: str, layout: Layout, options: EngineOptions
) -> tuple[HostChunks, int, BufferRegion | None]:
    """Return chunks, followed by the CPU buffer if there is one, and by mapping slots if there are
    other instances; the number of the slots, and the buffer's place.

    :raises ChangeSomething: if the buffer holds no large page, or the system refuses the addresses.
    """
    num_slots = MOST_NEIGHBOURS if options.pool_place is not None else 0
    count = _buffer_larges(layout, options)
    large_bytes = layout.large_page_bytes
    region = BufferRegion.after(num_chunks, count, large_bytes) if count else None
    own_bytes = layout.pool_bytes if region is None else region.end_bytes
    more_chunks = 0 if region is None else -(-own_bytes // CHUNK_BYTES) - num_chunks
    buffer_bytes = more_chunks * CHUNK_BYTES
    beyond_bytes = MappedPeers.beyond_bytes(own_bytes, large_bytes, num_slots)
    try:
        device = HostChunks(num_chunks, flag, buffer_bytes + beyond_bytes)
    except ChangeSomething:
        if not num_slots:
            raise
        # With few addresses (ulimit -v) it serves without borrowing.
        num_slots = 0
        device = HostChunks(num_chunks, flag, buffer_bytes)
    try:
        if more_chunks:
            device.extend(more_chunks)
    except TryLater as error:
        value = typed_bytes(buffer_bytes)
        raise ChangeSomething("--cpu-buffer", value, str(error), "use a smaller size") from error
    return device, num_slots, region


def _with_beyond(memory: Memory, device: HostChunks, layout: Layout, num_slots: int) -> Memory:
    if memory.buffer is not None:
        memory = replace(memory, seen=host_pool(device.view_beyond()))
    if not num_slots:
        return memory
    own_bytes = layout.pool_bytes if memory.buffer is None else memory.buffer.end_bytes
    neighbours = MappedPeers(device, own_bytes, layout.large_page_bytes)
    return replace(memory, neighbours=neighbours, seen=host_pool(device.view_beyond()))


FLAG = "--instances"


def pool_problem(device: str) -> ChangeSomething | None:
    """Return why requests cannot move between instances; None if they can.

    Mixed instances support every device, but on a GPU no request moves.
    """
    if device == "cpu":
        return None
    problem = "is not served by prefill and decode instances yet"
    return ChangeSomething("--device", device, problem, f"use --device cpu, or use {FLAG} mixed=N")
