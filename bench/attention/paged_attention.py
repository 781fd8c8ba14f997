"""Paged attention as a share of what memory (decode) and arithmetic (prefill) allow.

See README.md beside this file.  Prints one table; nothing is written.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.machine import read_bandwidth
from kvell.attention.interface import AttendParams, AttentionKernels, GroupBatch, LayerPages
from kvell.attention.native import NativeKernels, instruction_sets
from kvell.attention.portable import PortableKernels

PAGE_TOKENS = 16
LAYERS = 30
SETTLE_SECONDS = 0.02


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    heads: int
    kv_heads: int
    head_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, bf16."""
        return 2 * self.kv_heads * self.head_size * 2


SMOLLM2 = Heads("SmolLM2 9/3 x 64", 9, 3, 64)
GEMMA3 = Heads("Gemma-3-270M 4/1 x 256", 4, 1, 256)


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the best and the median of the runs."""

    best: float
    median: float


def timed(call: Callable[[int], object], runs: int) -> Timing:
    """Times ``call(run)``; a warm-up call comes first."""
    call(0)
    seconds = []
    for run in range(1, runs + 1):
        time.sleep(SETTLE_SECONDS)
        begin = time.perf_counter()
        call(run)
        seconds.append(time.perf_counter() - begin)
    return Timing(min(seconds), statistics.median(seconds))


def make_layers(shape: Heads, pages: int, layers: int) -> list[LayerPages]:
    """A pool of random bf16 in which a page holds all layers, as in the engine."""
    layer_bytes = shape.token_bytes * PAGE_TOKENS
    pool = torch.randn(pages * layers * layer_bytes // 2, dtype=torch.bfloat16).view(torch.uint8)
    return [
        LayerPages(
            pool,
            torch.bfloat16,
            layers * layer_bytes,
            layer * layer_bytes,
            PAGE_TOKENS,
            shape.kv_heads,
            shape.head_size,
        )
        for layer in range(layers)
    ]


def make_batch(requests: int, context: int, new: int, page_tokens: int = PAGE_TOKENS) -> GroupBatch:
    """Requests of one length in shuffled pages."""
    pages = context // page_tokens

    def starts(each: int) -> torch.Tensor:
        return torch.arange(0, (requests + 1) * each, each, dtype=torch.int32)

    empty = torch.zeros(0, dtype=torch.int32)
    return GroupBatch(
        starts(new),
        torch.full((requests,), context, dtype=torch.int32),
        starts(pages),
        torch.randperm(requests * pages).to(torch.int32),
        torch.zeros(requests, dtype=torch.int32),
        empty,
        empty,
    )


class GatherAndSdpa:
    """The naive way: gather the pages, then torch's own attention."""

    name = "gather+sdpa"

    def attend(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> torch.Tensor:
        """Attention for requests of equal length whose context is whole pages."""
        requests = batch.context_lens.shape[0]
        pool = layer.pool.view(layer.dtype)
        half = layer.kv_heads * PAGE_TOKENS * layer.head_size
        stride, offset = layer.page_stride_bytes // 2, layer.layer_offset_bytes // 2
        shape = (pool.shape[0] // stride, 2, layer.kv_heads, PAGE_TOKENS, layer.head_size)
        view = pool.as_strided(
            shape, (stride, half, half // layer.kv_heads, layer.head_size, 1), offset
        )
        gathered = view[batch.page_ids.long()]
        gathered = gathered.view(requests, -1, *gathered.shape[1:])
        key, value = (
            gathered[:, :, i].transpose(1, 2).reshape(requests, layer.kv_heads, -1, layer.head_size)
            for i in (0, 1)
        )
        rows = query.view(requests, -1, *query.shape[1:]).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(
            rows, key, value, is_causal=rows.shape[2] > 1, scale=params.scale, enable_gqa=True
        )


def implementations(only_best: bool) -> dict[str, AttentionKernels | GatherAndSdpa]:
    """Name to implementation."""
    native = instruction_sets()[: 1 if only_best else None]
    found: dict[str, AttentionKernels | GatherAndSdpa] = {
        f"native {name}": NativeKernels(instruction_set=name) for name in native
    }
    if only_best:
        return found
    return found | {"portable torch": PortableKernels(), "torch gather+sdpa": GatherAndSdpa()}


def decode_line(
    name: str,
    kernels: AttentionKernels | GatherAndSdpa,
    case: tuple[Heads, int, int],
    bandwidth: float,
    runs: int,
) -> str:
    """One decode step's attention, each run in another layer so that no cache helps."""
    shape, requests, context = case
    layers = make_layers(shape, requests * context // PAGE_TOKENS, LAYERS)
    batch = make_batch(requests, context, 1)
    query = torch.randn(requests, shape.heads, shape.head_size, dtype=torch.bfloat16)
    params = AttendParams(shape.head_size**-0.5)

    def all_layers(_: int) -> None:
        for layer in layers:
            kernels.attend(layer, batch, query, params)

    timing = timed(all_layers, runs)
    moved = requests * context * shape.token_bytes * LAYERS
    best, median = moved / timing.best, moved / timing.median
    return (
        f"decode   {shape.name:24} batch {requests:3} ctx {context:5}  {name:18}"
        f" {best / 1e9:6.1f} GB/s best ({best / bandwidth:4.0%})"
        f" {median / 1e9:6.1f} median ({median / bandwidth:4.0%})"
        f" {timing.best / LAYERS * 1e6:8.0f} us/layer"
    )


def prefill_line(
    name: str,
    kernels: AttentionKernels | GatherAndSdpa,
    case: tuple[Heads, int, int],
    runs: int,
) -> str:
    """One layer's attention of a whole prompt; flops count the causal half only."""
    shape, requests, context = case
    layer = make_layers(shape, requests * context // PAGE_TOKENS, 1)[0]
    batch = make_batch(requests, context, context)
    rows = requests * context
    query = torch.randn(rows, shape.heads, shape.head_size, dtype=torch.bfloat16)
    params = AttendParams(shape.head_size**-0.5)
    timing = timed(lambda _: kernels.attend(layer, batch, query, params), runs)
    flops = 4 * shape.heads * shape.head_size * requests * context * (context + 1) / 2
    return (
        f"prefill  {shape.name:24} batch {requests:3} ctx {context:5}  {name:18}"
        f" {flops / timing.best / 1e9:6.1f} GFLOP/s best {flops / timing.median / 1e9:6.1f} median"
        f" {timing.best * 1e3:8.2f} ms/layer"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--best-only", action="store_true", help="only the best native kernels")
    return parser.parse_args()


def main() -> None:
    """Prints a line per kernel and case, after the bandwidth measured in the same run."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    bandwidth = read_bandwidth(args.runs)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {args.threads} thread(s), bf16, page 16")
    for requests in args.batch:
        for name, kernels in implementations(args.best_only).items():
            case = (SMOLLM2, requests, args.context)
            print(decode_line(name, kernels, case, bandwidth, args.runs), flush=True)
    for shape in (SMOLLM2, GEMMA3):
        for name, kernels in implementations(args.best_only).items():
            case = (shape, 1, args.context)
            print(prefill_line(name, kernels, case, args.runs), flush=True)


if __name__ == "__main__":
    main()
