"""Decode as a share of memory bandwidth, prefill beside torch's own attention."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.copying import copy_pages
from bench.gpu.place import SMALL_BLOCKS, Place
from bench.gpu.report import Row, figures
from bench.gpu.sizes import Heads, sizes_of
from bench.gpu.timing import graphed, timed
from kvell.attention.interface import (
    AttendParams,
    AttentionKernels,
    GroupBatch,
    HostLengths,
    LayerPages,
)
from kvell.attention.quantised import is_quantised, quantise
from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.sizes import HeadShape, long_blocks, short_blocks


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


def make_step(
    place: Place, heads: Heads, requests: int, context: int, new: int, layers: int = 0
) -> Step:
    """Make requests of one length in shuffled pages; as many layers as caches cannot hold."""
    pages = -(-context // heads.page_tokens)
    one = one_layer(heads)
    layer_bytes = one.page_bytes
    spread_bytes = sizes_of(place.pretends).cache_bytes
    layers = layers or max(2, spread_bytes // (requests * pages * layer_bytes))
    stride = layers * layer_bytes
    pool = _random_pool(place, requests * pages * stride, one)
    made = [
        replace(one, pool=pool, page_stride_bytes=stride, layer_offset_bytes=index * layer_bytes)
        for index in range(layers)
    ]
    query = torch.randn(
        requests * new, heads.heads, heads.head_size, dtype=place.dtype, device=place.device
    )
    params = AttendParams(heads.head_size**-0.5, heads.window_tokens)
    return Step(made, _batch(place, requests, context, new, pages), query, params)


def _random_pool(place: Place, size_bytes: int, layer: LayerPages) -> torch.Tensor:
    """Random numbers; of quantised rows, one drawn page's repeated."""
    if is_quantised(layer.dtype):
        drawn = torch.randn(4096, layer.head_size, device=place.device)
        rows = quantise(drawn, layer.dtype).flatten()
        return rows.repeat(-(-size_bytes // rows.numel()))[:size_bytes].contiguous()
    pool = torch.empty(size_bytes // layer.dtype.itemsize, dtype=layer.dtype, device=place.device)
    return pool.normal_().view(torch.uint8)


def _batch(place: Place, requests: int, context: int, new: int, pages: int) -> GroupBatch:
    def starts(each: int) -> torch.Tensor:
        return torch.arange(0, requests + 1, dtype=torch.int32) * each

    lengths = HostLengths(
        starts(new),
        torch.full((requests,), context, dtype=torch.int32),
        starts(pages),
        torch.zeros(requests, dtype=torch.int32),
    )
    empty = torch.zeros(0, dtype=torch.int32, device=place.device)
    ids = torch.randperm(requests * pages, device=place.device).to(torch.int32)
    on_gpu = {name: each.to(place.device) for name, each in vars(lengths).items()}
    return GroupBatch(
        **on_gpu, page_ids=ids, write_page_ids=empty, write_offsets=empty, host=lengths
    )


def decode(
    place: Place, kernels: AttentionKernels, heads: Heads, requests: int, context: int
) -> Row:
    """Time decodes of one new token each: bytes of keys and values over time.

    ``bytes_per_second`` is of captured graphs: the kernels alone, without Python.
    """
    step = make_step(place, heads, requests, context, 1)
    calls = step.calls(kernels)
    eager = timed(place, calls[:8])
    replay = graphed(place, lambda: [call() for call in calls])
    graph = timed(place, [replay]).median / len(calls)
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
    place: Place,
    kernels: AttentionKernels,
    heads: Heads,
    requests: int,
    context: int,
    alone: bool = False,
) -> Row:
    """Time whole prompts, and torch's attention unless ``alone``; FLOPs of the causal half only."""
    step = make_step(place, heads, requests, context, context, layers=2)
    flops = 4 * heads.heads * heads.head_size * requests * context * (context + 1) / 2
    own = timed(place, step.calls(kernels))
    row = {
        "kind": "prefill",
        "heads": heads.name,
        "requests": requests,
        "context": context,
        "flops_per_second": flops / own.median,
    }
    if alone:
        return row
    peers = _peers(place, heads, requests, context)
    return row | {name: flops / seconds for name, seconds in peers}


def with_warps(place: Place, heads: Heads, warps: int) -> TritonKernels:
    """Return kernels whose prefill has so many warps, to time it beside the one that is used."""
    layer = one_layer(heads)
    shape = HeadShape.of(layer, heads.heads)
    long = SMALL_BLOCKS[1] if place.pretends else long_blocks(layer, shape, place.dtype)
    short = SMALL_BLOCKS[0] if place.pretends else short_blocks(layer, shape, place.dtype)
    return TritonKernels((short, replace(long, warps=warps)))


def _named(heads: Heads, what: str) -> Heads:
    return replace(heads, name=f"{heads.name}, {what}")


def _peers(place: Place, heads: Heads, requests: int, context: int) -> Iterator[tuple[str, float]]:
    """Seconds of torch's own attention over contiguous tensors, and of FlashAttention."""
    q, k, v = (
        torch.randn(requests, n, context, heads.head_size, dtype=place.dtype, device=place.device)
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
                yield name, timed(place, [call]).median
        except RuntimeError:  # not built for this head size, or not on this GPU
            continue
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return
    rows = [each.transpose(1, 2) for each in (q, k, v)]
    yield "flash_attention", timed(place, [lambda: flash_attn_func(*rows, causal=True)]).median


def short_chunk(
    place: Place, kernels: AttentionKernels, heads: Heads, requests: int, context: int, new: int
) -> Row:
    """Time a piece of a prompt behind a long context."""
    step = make_step(place, heads, requests, context, new, layers=2)
    own = timed(place, step.calls(kernels))
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


def copying(place: Place, page_bytes: int, pages: int) -> Row:
    """Time gathering scattered pages into a buffer: bytes read and written over time."""
    pool = torch.zeros(2 * pages * page_bytes, dtype=torch.uint8, device=place.device)
    buffer = torch.empty(pages * page_bytes, dtype=torch.uint8, device=place.device)
    sources = torch.randperm(2 * pages, device=place.device)[:pages] * page_bytes
    targets = torch.arange(pages, device=place.device) * page_bytes

    def call() -> None:
        copy_pages(buffer, targets, pool, sources, page_bytes, page_bytes)

    own = timed(place, [call])
    return {
        "kind": "copy",
        "page_bytes": page_bytes,
        "bytes_per_second": 2 * pages * page_bytes / own.median,
    }


def warm(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Compile every ``of``-th kernel of the timings, so that they find it on disk."""
    place, sizes = Place.of(pretends), sizes_of(pretends)
    kernels = place.kernels()
    every = dict.fromkeys(heads for heads, _ in (*sizes.decodes, *sizes.prefills))
    for heads in list(every)[part::of]:
        yield figures(f"warm {heads.name}", partial(compiled, place, kernels, heads))


def compiled(place: Place, kernels: AttentionKernels, heads: Heads) -> Row:
    """Run decode and prefill of a shape once, which compiles its kernels."""
    begin = time.perf_counter()
    decode(place, kernels, heads, 1, 16 if place.pretends else 256)
    prefill(place, kernels, heads, 1, 20 if place.pretends else 64, alone=True)
    return {"kind": "warm", "heads": heads.name, "seconds": time.perf_counter() - begin}


def timings(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Yield the figures of attention's kernels and of copies."""
    place, sizes = Place.of(pretends), sizes_of(pretends)
    kernels = place.kernels()
    calls: list[partial[Row]] = [
        partial(time_batch, place, kernels, heads, requests, context)
        for time_batch, shapes in ((decode, sizes.decodes), (prefill, sizes.prefills))
        for heads, batches in shapes
        for requests, context in batches
    ]
    calls += [
        partial(prefill, place, with_warps(place, heads, 4), _named(heads, "4 warps"), *batch, True)
        for heads, (batch, *_) in sizes.prefills
    ]
    plain = sizes.decodes[0][0]
    calls += [
        partial(short_chunk, place, kernels, plain, 1, context, new)
        for context, new in sizes.chunk_contexts
    ]
    for call in (*calls, partial(copying, place, *sizes.copied)):
        yield figures(call.func.__name__ + str(call.args[2:]), call)
