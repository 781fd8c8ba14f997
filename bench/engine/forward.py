"""The forward pass alone: fused, fused with empty callbacks, and transformers' code.

``--quantization int8 int4`` adds fused passes over weights of eight and four bits; ``--model
falcon-h1-small`` is a shape with states (``bench/cost/shapes``), written on first use, and
``--transformers`` adds transformers' own step over a cache of its own.  ``--instruction-sets`` adds
fused passes by other kernels than the processor's best.

Rounds alternate.  A decode step is given as a share of the read bandwidth measured in the same run;
a prefill as the rate of its products with weights.

``--rest 0.05`` waits before every pass, as a server does between requests: its threads sleep.

On a machine with busy neighbours ``--clock cpu`` with ``--threads 1`` counts the thread's own
seconds, in which others matter only through caches and memory.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.cost.shapes import NAMES, model_path
from kvell.attention.choice import choose_kernels
from kvell.attention.interface import GroupBatch
from kvell.attention.native import NativeKernels, instruction_sets
from kvell.attention.states import StateBatch
from kvell.memory import GroupKind, GroupSpec, Layout, plan_layout
from kvell.models.config.quantization import QUANTIZATIONS
from kvell.models.loading.loading import load_paged_model
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.models.sources.source import resolve_model
from kvell.vocabulary import MIB


@dataclass(frozen=True)
class Shape:
    """A step: requests, each with new tokens at the end of a context."""

    requests: int
    new_tokens: int
    context_tokens: int

    @classmethod
    def named(cls, step: str) -> "Shape":
        """Parse a step such as 32x1x192.

        :raises ValueError: if it is not three numbers, or the context is shorter than the new part.
        """
        shape = cls(*(int(part) for part in step.split("x")))
        if not 1 <= shape.new_tokens <= shape.context_tokens:
            raise ValueError(f"{step}: a context has its new tokens at its end")
        return shape

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.requests * self.new_tokens


STEPS = ("1x1x192", "8x1x192", "32x1x192", "1x1x4096", "1x512x512", "4x512x512")
"""Requests × new tokens × context tokens."""


class NoCallbacks:
    """Callbacks that do nothing."""

    def after_kv_write(self, layer: int) -> None:
        """Nothing."""

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        """Nothing."""

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        """Nothing."""


def batch_of(shape: Shape, layout: Layout, seed: int) -> ForwardBatch:
    """Random tokens; pages in random order, the same for every group.

    :raises ValueError: if a group has too few pages.
    """
    draw = torch.Generator().manual_seed(seed)
    ends, new = shape.context_tokens, shape.new_tokens
    positions = torch.arange(ends - new, ends).repeat(shape.requests)
    requests = torch.arange(shape.requests + 1)
    make = {GroupKind.STATE: _states}
    return ForwardBatch(
        torch.randint(10, 40_000, (shape.tokens,), generator=draw),
        positions,
        tuple(
            make.get(group.kind, _group)(shape, positions, group, layout.pool_bytes, draw)
            for group in layout.groups
        ),
        requests[1:] * new - 1,
    )


def _group(
    shape: Shape, positions: torch.Tensor, group: GroupSpec, pool_bytes: int, draw: torch.Generator
) -> GroupBatch:
    page_tokens = group.page_tokens
    pages = -(-shape.context_tokens // page_tokens)
    available = pool_bytes // group.page_stride_bytes
    if shape.requests * pages > available:
        raise ValueError(f"{shape} needs more than {available} pages")
    tables = torch.randperm(shape.requests * pages, generator=draw).int()
    owners = torch.arange(shape.requests).repeat_interleave(shape.new_tokens)
    starts = torch.arange(shape.requests + 1, dtype=torch.int32)
    return GroupBatch(
        query_starts=starts * shape.new_tokens,
        context_lens=torch.full((shape.requests,), shape.context_tokens, dtype=torch.int32),
        table_starts=starts * pages,
        page_ids=tables,
        first_positions=torch.zeros(shape.requests, dtype=torch.int32),
        write_page_ids=tables.view(-1, pages)[owners, positions // page_tokens].contiguous(),
        write_offsets=(positions % page_tokens).int(),
    )


def _states(
    shape: Shape, positions: torch.Tensor, group: GroupSpec, pool_bytes: int, draw: torch.Generator
) -> StateBatch:
    """Running states that are updated in place; no checkpoints."""
    count, available = shape.requests * group.slices, pool_bytes // group.page_stride_bytes
    if count > available:
        raise ValueError(f"{shape} needs more than {available} pages")
    none = torch.zeros(0, dtype=torch.int32)
    return StateBatch(
        query_starts=torch.arange(shape.requests + 1, dtype=torch.int32) * shape.new_tokens,
        starts=positions[:: shape.new_tokens].int(),
        page_ids=torch.randperm(count, generator=draw).int().view(shape.requests, group.slices),
        cut_requests=none,
        cut_tokens=none,
        cut_page_ids=none.view(0, group.slices),
    )


class Transformers:
    """Transformers' own forward pass over a cache that it grows."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._caches: dict[int, Any] = {}

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> object:
        """Run the batch's tokens behind contexts of the same length, of random tokens."""
        rows = batch.logits_rows.numel()
        new = batch.token_ids.view(rows, -1)
        before = int(batch.positions[0])
        if before == 0:
            return self._step(new, None)
        if id(batch) not in self._caches:
            ids = torch.randint(10, 40_000, (rows, before))
            self._caches = {id(batch): self._step(ids, None)}  # only the newest is of use
        self._caches[id(batch)] = self._step(new, self._caches[id(batch)])
        return None

    def _step(self, ids: torch.Tensor, cache: Any) -> Any:
        made = self._module(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return made.past_key_values


def measure(
    passes: dict[str, Callable[[ForwardBatch], object]],
    batch: ForwardBatch,
    rounds: int,
    clock: Callable[[], float],
    rest_seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of every round; passes take turns, each after a rest."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds + 1):
        for name, run in passes.items():
            time.sleep(rest_seconds)
            start = clock()
            run(batch)
            seconds[name].append(clock() - start)
    return {name: taken[1:] for name, taken in seconds.items()}


def read_bytes(model: PagedModel, layout: Layout, shape: Shape) -> int:
    """Bytes that a step moves: weights once, the pages of every context, states twice."""
    pages = sum(
        group.page_stride_bytes
        * (
            2 * group.slices  # read and written
            if group.kind is GroupKind.STATE
            else -(-shape.context_tokens // group.page_tokens)
        )
        for group in layout.groups
    )
    assert model.fused is not None, "an embedding of its own is not read"
    return model.fused.weight_bytes + shape.requests * pages


def show(
    console: Console,
    results: dict[str, dict[str, list[float]]],
    bytes_read: dict[str, dict[str, int]],
    bandwidth: float,
) -> None:
    """Print best (median) milliseconds, and ratios to the fused pass."""
    table = Table(title="ms of a step: best (median)")
    names = list(next(iter(results.values())))
    forms = [name for name in next(iter(bytes_read.values())) if name != "fused"]
    theirs = [name for name in names if name == "transformers"]
    shares = [f"{name} of bandwidth" for name in ("fused", *forms)]
    for column in (
        *("step", *names, "fused tokens/s", "generic / fused", "callbacks"),
        *(f"{name} / fused" for name in theirs),
        *(f"fused / {name}" for name in forms),
        *shares,
    ):
        table.add_column(column, justify="right")
    for step, rounds in results.items():
        cells = [f"{min(s) * 1e3:.2f} ({statistics.median(s) * 1e3:.2f})" for s in rounds.values()]
        fused, generic = min(rounds["fused"]), min(rounds["generic"])
        cost = min(rounds["with callbacks"]) / fused - 1
        requests, new, _ = (int(part) for part in step.split("x"))
        shares = [
            f"{size / min(rounds[name]) / 1e9 / bandwidth:.0%}" if new == 1 else "–"
            for name, size in bytes_read[step].items()
        ]
        table.add_row(
            step,
            *cells,
            f"{requests * new / fused:.0f}",
            f"{generic / fused:.2f}×",
            f"{cost:+.1%}",
            *(f"{min(rounds[name]) / fused:.2f}×" for name in theirs),
            *(f"{fused / min(rounds[name]):.2f}×" for name in forms),
            *shares,
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--quantization", nargs="*", choices=QUANTIZATIONS[1:], default=(), help="beside --dtype"
    )
    parser.add_argument(
        "--instruction-sets", nargs="*", choices=instruction_sets(), default=(), help="to compare"
    )
    parser.add_argument("--steps", nargs="+", default=STEPS, help="requests x new x context")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before every pass")
    machine.add_clock_options(parser)
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    clock = machine.chosen_clock(parser, options)
    work, dtype = options.cache_dir / "bench", getattr(torch, options.dtype)
    named = options.model in NAMES
    path = (
        model_path(options.model, options.cache_dir, work)
        if named
        else resolve_model(options.model, options.cache_dir)
    )
    kernels = choose_kernels(torch.device("cpu"))
    models = [load_paged_model(path, kernels, dtype, fused=fused) for fused in (True, False)]
    others = {
        name: load_paged_model(path, kernels, dtype, quantization=name)
        for name in options.quantization
    } | {
        name: load_paged_model(path, NativeKernels(0, name), dtype)
        for name in options.instruction_sets
    }
    layout = plan_layout(models[0].description.layers, options.pool_mib * MIB)
    for model in (*models, *others.values()):
        model.attach(layout, torch.zeros(layout.pool_bytes, dtype=torch.uint8))
    fused, generic = models
    passes: dict[str, Callable[[ForwardBatch], object]] = {
        "fused": fused.forward,
        **{name: model.forward for name, model in others.items()},
        "with callbacks": lambda batch: fused.forward(batch, NoCallbacks()),
        "generic": generic.forward,
    }
    if options.transformers:
        passes["transformers"] = Transformers(path, dtype)
    results, bytes_read = {}, {}
    for step in options.steps:
        shape = Shape.named(step)
        batch = batch_of(shape, layout, shape.tokens)
        rounds = max(2, options.rounds // 4) if shape.new_tokens > 1 else options.rounds
        results[step] = measure(passes, batch, rounds, clock, options.rest)
        read = {"fused": fused, **others}
        bytes_read[step] = {name: read_bytes(one, layout, shape) for name, one in read.items()}
    about, console = machine.describe(clock), Console(width=150)
    console.print(about)
    bandwidth = about["read_bandwidth_gb_per_second"]
    assert isinstance(bandwidth, float)
    show(console, results, bytes_read, bandwidth)
    if options.json:
        told = {"rest_seconds": options.rest, "seconds": results, "bytes": bytes_read}
        result_file.write(options.json, {"machine": about} | told)


if __name__ == "__main__":
    main()
