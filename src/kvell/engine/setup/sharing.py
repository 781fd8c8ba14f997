"""``--memory``: one limit for weights, KV cache and activations, and its division.

If a fused pass computes every step, KV cache and activations share one pool of chunks, and each
step's activations are a slot of it.  Otherwise torch allocates activations: they get a fixed
reserve, and KV has the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvell.byte_sizes import typed_bytes
from kvell.device.chunks import ChunkDevice
from kvell.elastic.arena import ActivationNeed
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import Tiling
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.warmer import Warmer
from kvell.errors import ChangeSomething
from kvell.memory import Layout, Manager, WithholdingCore
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    from kvell.models.paged_model import PagedModel

CUT_AT_START: frozenset[Manager] = frozenset({"static", "manual"})
"""Managers that divide the pool among groups at start."""
WARM_CHUNKS = 32
"""Chunks that are committed before the first request; a thread commits the others later."""


def can_share(models: "Sequence[PagedModel]", options: EngineOptions) -> bool:
    """Return whether KV cache and activations may share a pool.

    They may not in a pool divided at start, or if prompts are computed whole, which need room at
    any time.
    """
    is_fused = all(model.fused is not None for model in models)
    return is_fused and options.enable_chunked_prefill and options.manager not in CUT_AT_START


@dataclass(frozen=True)
class Bound:
    """The value of ``--memory``, and the parts that the pool does not get."""

    memory_bytes: int
    weights_bytes: int
    reserve_bytes: int

    @property
    def taken_bytes(self) -> int:
        return self.weights_bytes + self.reserve_bytes

    def pool_bytes(self, kv_memory_bytes: int | None, available_bytes: int) -> int:
        """Return the size of the pool.

        :param kv_memory_bytes: KV's initial share, or its fixed size if it has a separate pool.
        :raises ChangeSomething: if nothing is left for the pool, or less than ``kv_memory_bytes``;
            or if the pool is larger than the machine's free memory.
        """
        left_bytes = self.memory_bytes - self.taken_bytes
        if left_bytes < MIB:
            raise ChangeSomething(
                "--memory",
                typed_bytes(self.memory_bytes),
                f"leaves nothing for the KV cache after {_mib(self.weights_bytes)} of weights"
                + f" and {_mib(self.reserve_bytes)} for activations" * bool(self.reserve_bytes),
                f"use at least --memory {-(-self.taken_bytes // MIB) + 64}MiB",
            )
        if kv_memory_bytes is not None and kv_memory_bytes > left_bytes:
            raise ChangeSomething(
                "--kv-memory",
                typed_bytes(kv_memory_bytes),
                f"is more than --memory leaves after {_mib(self.taken_bytes)}",
                f"use at most --kv-memory {left_bytes // MIB}MiB, or leave it out",
            )
        wanted_bytes = kv_memory_bytes if self.reserve_bytes and kv_memory_bytes else left_bytes
        if wanted_bytes + self.reserve_bytes > available_bytes:
            most_mib = (available_bytes + self.weights_bytes) // MIB
            raise ChangeSomething(
                "--memory",
                typed_bytes(self.memory_bytes),
                f"is more than the machine's free memory after loading: {_mib(available_bytes)}",
                f"use at most --memory {most_mib}MiB",
            )
        return wanted_bytes


def beside_activations(
    layout: Layout, need: ActivationNeed, chunk_bytes: int, tokens: int, rows: int
) -> Layout:
    """Return the part of a shared pool left to KV during a step of ``tokens`` and ``rows``.

    Large pages may straddle the chunks at both ends of the activations.
    """
    chunks = -(-need.need_bytes(tokens, rows) // chunk_bytes)
    lost = -(-(chunks + 2) * chunk_bytes // layout.large_page_bytes) + 1
    return replace(layout, num_large_pages=max(1, layout.num_large_pages - lost))


@dataclass(frozen=True)
class SharedPool:
    """A pool of chunks for KV and activations, and its :class:`SharedMemory`."""

    device: ChunkDevice
    elastic: ElasticMemory
    steps: SharedMemory

    def warmer(self) -> Warmer | None:
        """Return a warmer of the uncommitted chunks; None if all are committed."""
        cold = self.elastic.balloon.uncommitted_chunks
        return Warmer(self.device, cold) if cold else None


def share_pool(
    device: ChunkDevice,
    layout: Layout,
    core: WithholdingCore,
    need: ActivationNeed,
    kv_memory_bytes: int | None = None,
    committed_chunks: int | None = WARM_CHUNKS,
) -> SharedPool:
    """Put KV cache into a device's chunks, and activations into chunks that KV does not need.

    :param kv_memory_bytes: KV's initial share; None for all of it.
    :param committed_chunks: number of chunks that are committed before this returns; None: all.
    """
    size, num_chunks = device.chunk_bytes, device.num_chunks
    tiled = Tiling(num_chunks, size, layout.large_page_bytes, layout.num_large_pages)
    first = None if committed_chunks is None else min(committed_chunks, num_chunks)
    elastic = ElasticMemory(device, core, tiled, first)
    if kv_memory_bytes is not None:
        elastic.ensure(max(0, num_chunks - -(-kv_memory_bytes // size)))
    return SharedPool(device, elastic, SharedMemory(core, elastic, need))


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // MIB):,} MiB"
