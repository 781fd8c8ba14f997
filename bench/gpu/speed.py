"""Decode as a share of memory bandwidth, prefill beside torch's own attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.timing import graphed, timed
from kvell.attention.interface import (
    AttendParams,
    AttentionKernels,
    GroupBatch,
    HostLengths,
    LayerPages,
)
from kvell.attention.quantised import is_quantised, quantise
from kvell.attention.triton.copying import copy_pages

CACHE_BYTES = 1 << 30
"""Bytes that keys and values are spread over, so that no cache holds what is read next."""


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    heads: int
    kv_heads: int
    head_size: int
    value_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = 16
    window_tokens: int = 0


LLAMA = Heads("llama 32/8 x 128", 32, 8, 128)
DECODES = (
    LLAMA,
    Heads("qwen 28/4 x 128", 28, 4, 128),
    Heads("gemma 8/4 x 256", 8, 4, 256),
    Heads("gpt-oss 64/8 x 64", 64, 8, 64),
    Heads("latent 128/1 x 576", 128, 1, 576, 512),
    Heads("llama, pages of 32", 32, 8, 128, page_tokens=32),
    Heads("llama, fp8", 32, 8, 128, dtype=torch.float8_e4m3fn),
    Heads("llama, int8", 32, 8, 128, dtype=torch.int8),
)
PREFILLS = (LLAMA, Heads("gemma 8/4 x 256", 8, 4, 256), Heads("gpt-oss 64/8 x 64", 64, 8, 64))


@dataclass(frozen=True)
class Step:
    """A batch over layers that are contiguous within each page, as in the engine."""

    layers: list[LayerPages]
    batch: GroupBatch
    query: torch.Tensor
    params: AttendParams

    def calls(self, kernels: AttentionKernels) -> list[Callable[[], torch.Tensor]]:
        """Attention of each layer."""
        return [
            partial(kernels.attend, layer, self.batch, self.query, self.params)
            for layer in self.layers
        ]


def one_layer(heads: Heads) -> LayerPages:
    """A layer of this shape, without memory."""
    empty = torch.empty(0, dtype=torch.uint8)
    return LayerPages(
        empty,
        heads.dtype,
        0,
        0,
        heads.page_tokens,
        heads.kv_heads,
        heads.head_size,
        heads.value_size,
    )


def make_step(heads: Heads, requests: int, context: int, new: int, layers: int = 0) -> Step:
    """Requests of one length in shuffled pages; as many layers as ``CACHE_BYTES`` hold."""
    pages = -(-context // heads.page_tokens)
    one = one_layer(heads)
    layer_bytes = one.page_bytes
    layers = layers or max(2, CACHE_BYTES // (requests * pages * layer_bytes))
    stride = layers * layer_bytes
    pool = _random_pool(requests * pages * stride, one)
    made = [
        replace(one, pool=pool, page_stride_bytes=stride, layer_offset_bytes=index * layer_bytes)
        for index in range(layers)
    ]
    query = torch.randn(
        requests * new, heads.heads, heads.head_size, dtype=torch.bfloat16, device="cuda"
    )
    params = AttendParams(heads.head_size**-0.5, heads.window_tokens)
    return Step(made, _batch(requests, context, new, pages), query, params)


def _random_pool(size_bytes: int, layer: LayerPages) -> torch.Tensor:
    """Random numbers; of quantised rows, one drawn page's repeated."""
    if is_quantised(layer.dtype):
        rows = quantise(torch.randn(4096, layer.head_size, device="cuda"), layer.dtype).flatten()
        return rows.repeat(-(-size_bytes // rows.numel()))[:size_bytes].contiguous()
    pool = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device="cuda")
    return pool.normal_().view(torch.uint8)


def _batch(requests: int, context: int, new: int, pages: int) -> GroupBatch:
    def starts(each: int) -> torch.Tensor:
        return torch.arange(0, requests + 1, dtype=torch.int32) * each

    lengths = HostLengths(
        starts(new),
        torch.full((requests,), context, dtype=torch.int32),
        starts(pages),
        torch.zeros(requests, dtype=torch.int32),
    )
    empty = torch.zeros(0, dtype=torch.int32, device="cuda")
    ids = torch.randperm(requests * pages, device="cuda").to(torch.int32)
    on_gpu = {name: each.cuda() for name, each in vars(lengths).items()}
    return GroupBatch(
        **on_gpu, page_ids=ids, write_page_ids=empty, write_offsets=empty, host=lengths
    )


def decode(kernels: AttentionKernels, heads: Heads, requests: int, context: int) -> dict[str, Any]:
    """Time decodes of one new token each: bytes of keys and values over time.

    ``bytes_per_second`` is of captured graphs: the kernels alone, without Python.
    """
    step = make_step(heads, requests, context, 1)
    calls = step.calls(kernels)
    eager = timed(calls[:8])
    graph = timed([graphed(lambda: [call() for call in calls])]).median / len(calls)
    layer = step.layers[0]
    moved = requests * context * layer.page_bytes // layer.page_tokens
    return {
        "kind": "decode",
        "heads": heads.name,
        "requests": requests,
        "context": context,
        "microseconds": graph * 1e6,
        "microseconds_with_launches": eager.median * 1e6,
        "bytes_per_second": moved / graph,
    }


def prefill(
    kernels: AttentionKernels, heads: Heads, requests: int, context: int, alone: bool = False
) -> dict[str, Any]:
    """Time whole prompts, and torch's attention unless ``alone``; FLOPs of the causal half only."""
    step = make_step(heads, requests, context, context, layers=2)
    flops = 4 * heads.heads * heads.head_size * requests * context * (context + 1) / 2
    own = timed(step.calls(kernels))
    row = {
        "kind": "prefill",
        "heads": heads.name,
        "requests": requests,
        "context": context,
        "flops_per_second": flops / own.median,
    }
    if alone:
        return row
    return row | {name: flops / seconds for name, seconds in _peers(heads, requests, context)}


def _peers(heads: Heads, requests: int, context: int) -> Iterator[tuple[str, float]]:
    """Seconds of torch's own attention over contiguous tensors, and of FlashAttention."""
    q, k, v = (
        torch.randn(requests, n, context, heads.head_size, dtype=torch.bfloat16, device="cuda")
        for n in (heads.heads, heads.kv_heads, heads.kv_heads)
    )
    for name, backend in (
        ("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                call = lambda: functional.scaled_dot_product_attention(  # noqa: E731
                    q, k, v, is_causal=True, enable_gqa=True
                )
                yield name, timed([call]).median
        except RuntimeError:  # not built for this head size, or not on this GPU
            continue
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return
    rows = [each.transpose(1, 2) for each in (q, k, v)]
    yield "flash_attention", timed([lambda: flash_attn_func(*rows, causal=True)]).median


def short_chunk(
    kernels: AttentionKernels, heads: Heads, requests: int, context: int, new: int
) -> dict[str, Any]:
    """Time a piece of a prompt behind a long context."""
    step = make_step(heads, requests, context, new, layers=2)
    own = timed(step.calls(kernels))
    flops = 4 * heads.heads * heads.head_size * requests * new * (context - new / 2)
    return {
        "kind": "chunk",
        "heads": heads.name,
        "requests": requests,
        "context": context,
        "new": new,
        "microseconds": own.median * 1e6,
        "flops_per_second": flops / own.median,
    }


def copying(page_bytes: int = 64 << 10, pages: int = 32_768) -> dict[str, Any]:
    """Time gathering scattered pages into a buffer: bytes read and written over time."""
    pool = torch.empty(2 * pages * page_bytes, dtype=torch.uint8, device="cuda")
    buffer = torch.empty(pages * page_bytes, dtype=torch.uint8, device="cuda")
    sources = torch.randperm(2 * pages, device="cuda")[:pages] * page_bytes
    targets = torch.arange(pages, device="cuda") * page_bytes
    own = timed([lambda: copy_pages(buffer, targets, pool, sources, page_bytes, page_bytes)])
    return {
        "kind": "copy",
        "page_bytes": page_bytes,
        "bytes_per_second": 2 * pages * page_bytes / own.median,
    }
