"""How large an engine's pool is, and how much of it is promised to one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvell.device.available import available_bytes, default_kv_memory_bytes
from kvell.device.host import CHUNK_BYTES
from kvell.elastic.arena import LargestNeed
from kvell.elastic.tiling import covering_bytes
from kvell.engine.requests.limits import Limits
from kvell.engine.setup.affordable import check_affordable, check_buffer
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sharing import Bound, beside_activations, can_share
from kvell.errors import ChangeSomething
from kvell.memory import LayerSpec, Layout, plan_layout, requests_that_fit
from kvell.models.paged_model import PagedModel

FEWEST_LARGE = 16
"""Fewest large pages that a shared pool may have for them to be enlarged to whole chunks."""
GPU_KV_SHARE = 0.9
"""Part of a GPU's free memory, after weights and reserve, that becomes the KV pool."""


@dataclass(frozen=True)
class Sizes:
    """How an engine's memory is divided.

    :param reserve_bytes: for activations beside the pool; 0 where they share it.
    :param shared_chunks: of the pool, where activations share it; else 0.
    :param promised: the part of the pool that one request may count on.
    """

    weights_bytes: int
    need: LargestNeed
    reserve_bytes: int
    layout: Layout
    promised: Layout
    shared_chunks: int = 0
    memory_bytes: int | None = None

    def fitting(self, layout: Layout, tokens: int) -> int:
        """How many requests of ``tokens`` decode at once, with their activations."""
        count = requests_that_fit(layout, tokens)
        if not self.shared_chunks or not count:
            return count
        left = beside_activations(layout, self.need, CHUNK_BYTES, count, count)
        return requests_that_fit(left, tokens)


def sizes_of(
    every: Sequence[PagedModel],
    layers: Sequence[LayerSpec],
    options: EngineOptions,
    *,
    has_draft: bool,
) -> Sizes:
    """Divide memory by ``--memory``, ``--kv-memory``, or what the machine has.

    :raises ChangeSomething: for ``--memory`` on a GPU, or more memory than the machine has.
    """
    need = LargestNeed(tuple(one.activations for one in every))
    weights_bytes = sum(one.weight_bytes for one in every)
    reserve_bytes = need.need_bytes(options.max_num_batched_tokens, options.max_step_logits)
    device, memory_bytes = every[0].device, options.memory_bytes
    host_free_bytes = available_bytes() // options.memory_parts
    if memory_bytes is None:
        kv_bytes = options.kv_memory_bytes or _default_kv_bytes(device, reserve_bytes)
        free_bytes = host_free_bytes if device.type == "cpu" else _free_bytes(device)
        host_bytes = host_free_bytes + (0 if device.type == "cpu" else kv_bytes + reserve_bytes)
        check_affordable(options, kv_bytes, reserve_bytes, free_bytes, host_bytes)
        layout = layout_of(layers, kv_bytes, options)
        return Sizes(weights_bytes, need, reserve_bytes, layout, layout)
    if device.type != "cpu":
        problem = "is for CPUs: on a GPU activations have a reserve of their own"
        raise ChangeSomething("--memory", f"{memory_bytes}B", problem, "use --kv-memory")
    shares = can_share(every, options, has_draft=has_draft)
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
    """The flag that sets the pool's size, its value, and the bytes in it beside the pool."""

    name: str
    value_bytes: int
    beside_bytes: int = 0


def flag_of(sizes: Sizes, options: EngineOptions) -> PoolFlag:
    """The flag to change for a larger pool."""
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
    """Plan the layout; embeddings get pages of their own if a token's KV has no room for one."""
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
    """The layout of a pool that activations share: whole chunks in large pages, unless it is small.

    Otherwise many large pages lie in a chunk, and one used page in any of them keeps it (ADR 14).
    """
    own = layout_of(layers, pool_bytes, options)
    large_bytes = covering_bytes(own.large_page_bytes, CHUNK_BYTES)
    if pool_bytes < FEWEST_LARGE * large_bytes:
        return own
    return layout_of(layers, pool_bytes, options, large_bytes)


def _default_kv_bytes(device: torch.device, reserve_bytes: int) -> int:
    """A quarter of what is available on a CPU; most of what is left on a GPU."""
    if device.type != "cuda":
        return default_kv_memory_bytes(available_bytes())
    return int((_free_bytes(device) - reserve_bytes) * GPU_KV_SHARE)


def _free_bytes(device: torch.device) -> int:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes
