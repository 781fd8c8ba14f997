"""Decode attention as a share of the read bandwidth, for every head shape, 1 K to 8 K of context.

The shapes are those of ``bench/configs`` and of the packaged model. Pages of 8 and of 16 tokens
take turns.  Everything read in a run is larger than the caches and lies in huge pages, as
the engine's pool does.  ``--clock cpu --threads 1`` counts the thread's own seconds, in which busy
neighbours matter only through caches and memory.

The bandwidth is measured beside every run, and a share is the median over such pairs, because the
bandwidth of a machine with busy neighbours changes by the minute.  The share of the roofline is
shown beside it: where a byte needs more arithmetic than the machine does while it reads one, the
GEMM peak is the limit.
"""

import argparse
import math
import mmap
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.attention.paged_attention import Heads, make_batch
from bench.replay.shapes import read_shape
from kvell.attention.interface import AttendParams, LayerPages
from kvell.attention.native import NativeKernels, instruction_sets
from kvell.memory import GroupKind, LayerSpec

CONFIGS = Path("bench", "configs")
PAGE_TOKENS = (16, 8)
CONTEXTS = (1024, 2048, 4096, 8192)
READ_BYTES = 1 << 30
"""Least bytes of a run: far larger than any cache, also than a host's cache shared by guests."""
REQUESTS = 8
"""Requests that decode together, or as many as fit; with one, the call itself would be timed."""
WANTED = 0.7
"""Share of the read bandwidth that is wanted."""
ELSEWHERE = frozenset({GroupKind.STATE, GroupKind.VISION})


@dataclass(frozen=True)
class Shape(Heads):
    """A model's attention shape; ``value_size`` is not 0 for latents, whose keys are values too."""

    value_size: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, bf16."""
        return super().token_bytes // (2 if self.value_size else 1)

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic per byte of a token's keys and values; a multiply and add is two."""
        sizes = self.head_size + (self.value_size or self.head_size)
        return 2 * self.heads * sizes / self.token_bytes

    def limit(self, roofline: machine.Roofline) -> float:
        """Bytes per second that memory and arithmetic both allow."""
        arithmetic = roofline.gemm_flops_per_second / self.flops_per_byte
        return min(roofline.read_bytes_per_second, arithmetic)

    @property
    def label(self) -> str:
        """Such as 32/8 x 128."""
        return f"{self.heads}/{self.kv_heads} x {self.head_size}{' latent' * bool(self.value_size)}"


@dataclass(frozen=True)
class Cell:
    """Seconds of every run, by tokens of a page.

    :param read_bytes: of each run.
    :param limits: bytes per second that a plain sum over the pool read beside each run.
    """

    shape: Shape
    context: int
    read_bytes: int
    seconds: dict[int, list[float]]
    limits: list[float]

    def share(self, page_tokens: int) -> float:
        """Share of the read bandwidth measured beside each run: the median run's."""
        return self.roofline_share(page_tokens, math.inf)

    def roofline_share(self, page_tokens: int, flops_per_second: float) -> float:
        """Share of what memory and arithmetic both allow; one GEMM peak for the whole bench."""
        pairs = zip(self.seconds[page_tokens], self.limits, strict=True)
        return statistics.median(
            self.read_bytes / taken / self.shape.limit(machine.Roofline(limit, flops_per_second))
            for taken, limit in pairs
        )

    @property
    def small_over_large(self) -> float:
        """Seconds with pages of 8 over those with 16: the median of neighbouring runs."""
        pairs = zip(self.seconds[8], self.seconds[16], strict=True)
        return statistics.median(small / large for small, large in pairs)


def shapes(directory: Path = CONFIGS) -> list[Shape]:
    """Each shape once, named by the first config that has it."""
    found = {(9, 3, 64, 0): Shape("smollm2", 9, 3, 64)}
    for path in sorted(directory.glob("*.json")):
        description = read_shape(path.stem).description
        for layer in description.layers:
            if layer.kind not in ELSEWHERE:
                shape = _shape(path.stem, description.query_heads, layer)
                found.setdefault((shape.heads, shape.kv_heads, *_sizes(shape)), shape)
    return sorted(found.values(), key=lambda one: (one.token_bytes, one.heads))


def _shape(name: str, heads: int, layer: LayerSpec) -> Shape:
    latent = 512 if layer.tensors == 1 else 0
    return Shape(name, heads, layer.kv_heads, layer.head_size, latent)


def _sizes(shape: Shape) -> tuple[int, int]:
    return shape.head_size, shape.value_size


def layers_of(pool: torch.Tensor, shape: Shape, page_tokens: int, tokens: int) -> list[LayerPages]:
    """As many layers as fill the pool; each has ``tokens`` tokens."""
    layer_bytes = shape.token_bytes * page_tokens
    count = max(1, pool.numel() // (shape.token_bytes * tokens))
    one = LayerPages(
        pool,
        torch.bfloat16,
        count * layer_bytes,
        0,
        page_tokens,
        shape.kv_heads,
        shape.head_size,
        shape.value_size,
    )
    return [replace(one, layer_offset_bytes=index * layer_bytes) for index in range(count)]


def measured(
    shape: Shape,
    context: int,
    pool: torch.Tensor,
    runs: int,
    clock: Callable[[], float],
    requests: int = REQUESTS,
) -> Cell:
    """Time requests that decode together, all layers in turn; page sizes alternate."""
    requests = min(requests, pool.numel() // (shape.token_bytes * context))
    kernels = NativeKernels(instruction_set=instruction_sets()[0])
    query = torch.randn(requests, shape.heads, shape.head_size, dtype=torch.bfloat16)
    params = AttendParams(shape.head_size**-0.5)
    cases = {size: layers_of(pool, shape, size, requests * context) for size in PAGE_TOKENS}
    batches = {size: make_batch(requests, context, 1, size) for size in PAGE_TOKENS}
    seconds: dict[int, list[float]] = {size: [] for size in PAGE_TOKENS}
    limits: list[float] = []
    for _ in range(runs + 1):
        limits.append(machine.read_rate(pool.view(torch.float32), 1, clock))
        for size, layers in cases.items():
            begin = clock()
            for layer in layers:
                kernels.attend(layer, batches[size], query, params)
            seconds[size].append(clock() - begin)
    read_bytes = requests * context * shape.token_bytes * len(cases[16])
    counted = {size: taken[1:] for size, taken in seconds.items()}
    return Cell(shape, context, read_bytes, counted, limits[1:])


def show(console: Console, cells: Sequence[Cell], roofline: machine.Roofline) -> None:
    """A row for each shape; the roofline's rates are the medians of the whole run."""
    bandwidth, flops = roofline.read_bytes_per_second, roofline.gemm_flops_per_second
    limits = f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s"
    table = Table(title=f"decode, share of bandwidth: pages of 16 (of 8); {limits}")
    contexts = sorted({cell.context for cell in cells})
    left = ("heads", "from", "bound by")
    for name in (*left, "flops/byte", *map(str, contexts), "of roofline", "8 over 16"):
        table.add_column(name, justify="left" if name in left else "right")
    for shape in dict.fromkeys(cell.shape for cell in cells):
        own = [cell for cell in cells if cell.shape == shape]
        shares = [f"{cell.share(16):.0%} ({cell.share(8):.0%})" for cell in own]
        rates = sorted(cell.roofline_share(16, flops) for cell in own)
        table.add_row(
            *(shape.label, shape.name, _bound(shape, roofline), f"{shape.flops_per_byte:.1f}"),
            *shares,
            f"{rates[0]:.0%} to {rates[-1]:.0%}",
            f"{statistics.median(cell.small_over_large for cell in own) - 1:+.1%}",
        )
    console.print(table)


def _bound(shape: Shape, roofline: machine.Roofline) -> str:
    return "memory" if shape.limit(roofline) == roofline.read_bytes_per_second else "arithmetic"


def below(cells: Sequence[Cell], roofline: machine.Roofline) -> list[str]:
    """Shapes and contexts below :data:`WANTED` of the bandwidth."""
    return [
        f"{cell.shape.label} at {cell.context}: {cell.share(16):.0%}, of its roofline "
        f"{cell.roofline_share(16, roofline.gemm_flops_per_second):.0%}"
        for cell in cells
        if cell.share(16) < WANTED
    ]


def random_pool(size_bytes: int) -> torch.Tensor:
    """Normal numbers in bf16, as bytes, in huge pages where the system has them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pool = torch.frombuffer(memory, dtype=torch.bfloat16)
    return pool.normal_().view(torch.uint8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    machine.add_clock_options(parser)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="that decode together")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    clock = machine.chosen_clock(parser, options)
    torch.manual_seed(0)
    console = Console(width=120)
    pool = random_pool(READ_BYTES)
    cells: list[Cell] = []
    peaks: list[float] = []
    for shape in shapes():
        peaks.append(machine.gemm_rate(rounds=options.runs, clock=clock))
        cells += [
            measured(shape, context, pool, options.runs, clock, options.requests)
            for context in options.contexts
        ]
    read = statistics.median(limit for cell in cells for limit in cell.limits)
    roofline = machine.Roofline(read, statistics.median(peaks))
    show(console, cells, roofline)
    console.print(f"below {WANTED:.0%}: {'; '.join(below(cells, roofline)) or 'none'}")
    if options.json:
        about = machine.describe(clock) | {
            "clock": options.clock,
            "requests": options.requests,
            "read_of_run": roofline.read_bytes_per_second,
            "flops_of_run": roofline.gemm_flops_per_second,
        }
        found = [_facts(cell, roofline) for cell in cells]
        result_file.write(options.json, {"machine": about, "cells": found})


def _facts(cell: Cell, roofline: machine.Roofline) -> dict[str, object]:
    flops = roofline.gemm_flops_per_second
    return {
        "heads": cell.shape.label,
        "from": cell.shape.name,
        "context": cell.context,
        "flops_per_byte": cell.shape.flops_per_byte,
        "bound_by": _bound(cell.shape, roofline),
        **{f"share_of_{size}": cell.share(size) for size in PAGE_TOKENS},
        **{f"roofline_share_of_{size}": cell.roofline_share(size, flops) for size in PAGE_TOKENS},
    }


if __name__ == "__main__":
    main()
