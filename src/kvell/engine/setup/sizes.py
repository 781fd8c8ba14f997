"""The size of an engine's pool, and the part of it that is promised to one request.

Checks that the machine has enough memory, before anything is reserved.

Memory is committed at its first touch, so a pool of any size can be reserved.  A pool that exceeds
the machine's memory would end in the kernel's out-of-memory killer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvell.byte_sizes import format_bytes, typed_bytes
from kvell.device.available import available_bytes, default_kv_memory_bytes
from kvell.device.host import CHUNK_BYTES
from kvell.elastic.arena import LargestNeed
from kvell.elastic.tiling import covering_bytes
from kvell.engine.requests.limits import Limits
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sharing import Bound, beside_activations, can_share
from kvell.errors import ChangeSomething
from kvell.memory import LayerSpec, Layout, plan_layout, requests_that_fit
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    import torch

    from kvell.models.paged_model import PagedModel


def check_affordable(
    options: EngineOptions, pool_bytes: int, reserve_bytes: int, free_bytes: int, host_bytes: int
) -> None:
    """Check a KV pool, its reserve and a CPU buffer against free memory; weights are loaded.

    :param free_bytes: free memory of the device that holds the pool.
    :param host_bytes: free host memory; equal to ``free_bytes`` on a CPU.
    :raises ChangeSomething: naming the flag, and the largest value that fits.
    """
    if pool_bytes + reserve_bytes > free_bytes:
        raise too_much("--kv-memory", pool_bytes, free_bytes, reserve_bytes)
    check_buffer(options, host_bytes - (pool_bytes + reserve_bytes))


def check_buffer(options: EngineOptions, left_bytes: int) -> None:
    """Check a CPU buffer against the host memory that remains after the pool.

    :raises ChangeSomething: naming the largest buffer that fits.
    """
    if options.cpu_buffer_bytes and options.cpu_buffer_bytes > left_bytes:
        raise too_much("--cpu-buffer", options.cpu_buffer_bytes, left_bytes, 0)


def too_much(flag: str, value: int, free_bytes: int, beside_bytes: int) -> ChangeSomething:
    """Return the error for a size that is more than the machine has free.

    :param beside_bytes: memory for activations, which the size does not include.
    """
    beside = f" after {-(-beside_bytes // MIB):,} MiB for activations" * bool(beside_bytes)
    most_mib = (free_bytes - beside_bytes) // MIB
    return ChangeSomething(
        flag,
        typed_bytes(value),
        f"is more than the machine has free{beside}: {max(0, free_bytes) // MIB:,} MiB",
        f"use at most {flag} {most_mib}MiB" if most_mib > 0 else "leave it out, or free memory",
    )


logger = logging.getLogger(__name__)

FEWEST_LARGE = 16
"""The fewest large pages of a shared pool whose large pages are enlarged to whole chunks."""
GPU_KV_SHARE = 0.9
"""The part of a GPU's free memory, after weights and reserve, for the KV pool."""


@dataclass(frozen=True)
class Sizes:
    """The division of an engine's memory.

    :param promised: the part of the pool that is guaranteed to one request.
    """

    weights_bytes: int
    need: LargestNeed
    reserve_bytes: int
    layout: Layout
    promised: Layout
    shared_chunks: int = 0
    memory_bytes: int | None = None

    def fitting(self, layout: Layout, tokens: int) -> int:
        """Return how many requests of ``tokens`` decode at once, with their activations."""
        count = requests_that_fit(layout, tokens)
        if not self.shared_chunks or not count:
            return count
        left = beside_activations(layout, self.need, CHUNK_BYTES, count, count)
        return requests_that_fit(left, tokens)


def sizes_of(
    every: "Sequence[PagedModel]",
    layers: Sequence[LayerSpec],
    options: EngineOptions,
) -> Sizes:
    """Divide memory by ``--memory``, ``--kv-memory``, or the machine's free memory.

    :raises ChangeSomething: for ``--memory`` on a GPU, or more memory than the machine has free.
    """
    need = LargestNeed(tuple(model.activations for model in every))
    weights_bytes = sum(model.weight_bytes for model in every)
    reserve_bytes = need.need_bytes(options.max_num_batched_tokens, options.max_step_logits)
    device, memory_bytes = every[0].device, options.memory_bytes
    host_free_bytes = available_bytes() // options.memory_parts
    if memory_bytes is None:
        free_bytes = host_free_bytes if device.type == "cpu" else _free_bytes(device)
        kv_bytes = (
            options.kv_memory_bytes
            or _share_bytes(
                options.gpu_memory_utilization, free_bytes, weights_bytes, reserve_bytes
            )
            or _default_kv_bytes(device, reserve_bytes)
        )
        host_bytes = host_free_bytes + (0 if device.type == "cpu" else kv_bytes + reserve_bytes)
        check_affordable(options, kv_bytes, reserve_bytes, free_bytes, host_bytes)
        layout = layout_of(layers, kv_bytes, options)
        return Sizes(weights_bytes, need, reserve_bytes, layout, layout)
    if device.type != "cpu":
        problem = "is for CPUs: on a GPU activations have a separate reserve"
        raise ChangeSomething("--memory", typed_bytes(memory_bytes), problem, "use --kv-memory")
    shares = can_share(every, options)
    bound = Bound(memory_bytes, weights_bytes, 0 if shares else reserve_bytes)
    free_bytes = host_free_bytes
    pool_bytes = bound.pool_bytes(options.kv_memory_bytes, free_bytes)
    check_buffer(options, free_bytes - pool_bytes)
    if not shares:
        layout = layout_of(layers, pool_bytes, options)
        return Sizes(weights_bytes, need, reserve_bytes, layout, layout, 0, memory_bytes)
    num_chunks = pool_bytes // CHUNK_BYTES
    layout = shared_layout(layers, num_chunks * CHUNK_BYTES, options)
    least = Limits().min_chunk_tokens
    promised = beside_activations(layout, need, CHUNK_BYTES, least, 1)
    return Sizes(weights_bytes, need, 0, layout, promised, num_chunks, memory_bytes)


@dataclass(frozen=True)
class PoolFlag:
    """The flag that sets the pool's size, its value, and its bytes outside the pool."""

    name: str
    value_bytes: int
    beside_bytes: int = 0


def flag_of(sizes: Sizes, options: EngineOptions) -> PoolFlag:
    """Return the flag to change for a larger pool."""
    layout = sizes.layout
    if sizes.memory_bytes is None or (options.kv_memory_bytes and not sizes.shared_chunks):
        return PoolFlag("--kv-memory", layout.pool_bytes)
    beside_bytes = sizes.weights_bytes + sizes.reserve_bytes
    if sizes.shared_chunks:  # a larger pool may have larger pages
        withheld = layout.num_large_pages - sizes.promised.num_large_pages
        beside_bytes += (withheld + 4) * layout.large_page_bytes + 2 * CHUNK_BYTES
    return PoolFlag("--memory", sizes.memory_bytes, beside_bytes)


def layout_of(
    layers: Sequence[LayerSpec],
    kv_bytes: int,
    options: EngineOptions,
    large_page_bytes: int | None = None,
) -> Layout:
    """Plan the layout; embeddings get separate pages if a token's KV has no room for one."""
    plan = partial(
        plan_layout, layers, kv_bytes, manager=options.manager, large_page_bytes=large_page_bytes
    )
    try:
        return plan(embeddings=options.embeddings)
    except ChangeSomething as problem:
        if problem.field != "embeddings":
            raise
    return plan()


def shared_layout(layers: Sequence[LayerSpec], pool_bytes: int, options: EngineOptions) -> Layout:
    """Return the layout of a pool that activations share.

    Unless the pool is small, large pages are whole chunks.  Otherwise a chunk has many large pages,
    and one used page in any of them keeps the chunk (ADR 14).
    """
    small_pages = layout_of(layers, pool_bytes, options)
    large_bytes = covering_bytes(small_pages.large_page_bytes, CHUNK_BYTES)
    if pool_bytes < FEWEST_LARGE * large_bytes:
        return small_pages
    return layout_of(layers, pool_bytes, options, large_bytes)


def _share_bytes(
    share: float | None, free_bytes: int, weights_bytes: int, reserve_bytes: int
) -> int | None:
    """Return the KV pool that a share of memory leaves to it; None without a share.

    :param free_bytes: free memory after loading.
    :raises ChangeSomething: if nothing is left.
    """
    if share is None:
        return None
    total_bytes = free_bytes + weights_bytes
    others_bytes = weights_bytes + reserve_bytes
    kv_bytes = int(total_bytes * share) - others_bytes
    flag = "--gpu-memory-utilization"
    total = format_bytes(total_bytes)
    others = format_bytes(others_bytes)
    if kv_bytes <= 0:
        problem = f"of {total} leaves nothing beside {others} of weights and activations"
        remedy = f"use more than {others_bytes / total_bytes:.3f}, or --kv-memory"
        raise ChangeSomething(flag, share, problem, remedy)
    logger.warning(
        "%s %g of %s free memory: %s for the KV pool, beside %s of weights and activations",
        flag,
        share,
        total,
        format_bytes(kv_bytes),
        others,
    )
    return kv_bytes


def _default_kv_bytes(device: "torch.device", reserve_bytes: int) -> int:
    if device.type != "cuda":
        return default_kv_memory_bytes(available_bytes())
    return int((_free_bytes(device) - reserve_bytes) * GPU_KV_SHARE)


def _free_bytes(device: "torch.device") -> int:
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes
