"""Memory that requests hold but do not need (waste), and the batch that it costs.

Run from the repository's root: ``python -m bench.replay.waste --traces DIR``.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.replay.packing import MEMORY_GIB, Packed, pack, table_of_packing
from bench.replay.peers import AZURE, PEERS, REQUESTS, ROWS, Row, replayed, vllm_figures
from bench.replay.shapes import PLANNED_BYTES, Shape, layout_of, read_shape
from kvell.memory import EVICTIONS, Eviction, Layout, Manager, create_core
from kvell.simulator.replay.metered import MeteredCore
from kvell.simulator.replay.replay import MAX_NUM_BATCHED_TOKENS
from kvell.simulator.report.metrics import MemoryMeter, Sample, waste
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow, placed
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("waste", result_file.VIRTUAL)
MANAGERS_COMPARED: tuple[Manager, ...] = ("kvell", "paged")
PAPER_PACKING = {"paged_waste": 0.382, "waste": 0.0004, "batch_of_paged": 1.95}
"""The Jenga paper's figures for such requests at 40 GiB."""
PAPER_DIGIT = 0.001
MAX_PACKING_WASTE, MIN_BATCH_OF_PAGED, PAGED_GIB, MIN_BATCH_OF_IDEAL = 0.0004, 1.7, 40, 0.97
MAX_WASTE, MAX_WASTE_MEAN, MAX_STRANDED = 0.025, 0.017, 0.05
"""Bounds on the conversation trace: of each row, of their mean, and of stranded memory."""


@dataclass(frozen=True)
class Longest:
    """A shape and length for which the Jenga paper computes the waste.

    :param paper: waste of a single page size.
    :param bound: most that Kvell may waste.
    """

    shape: str
    row: TraceRow
    paper: float
    bound: float


LONGEST = (
    Longest("llama-3.2-11b-vision", generate_trace("mmmu-pro", 1)[0], 0.796, 0.006),
    Longest("gemma2-9b", TraceRow(0.0, 8_192, 1), 0.25, 0.001),
    Longest("ministral-8b", TraceRow(0.0, 131_072, 1), 0.5625, 0.001),
)


@dataclass(frozen=True)
class EndOfPrompt:
    """One request whose prompt has just been computed."""

    shape: str
    manager: Manager
    tokens: int
    needed_bytes: int
    allocated_bytes: int
    waste: float
    stranded_bytes: int
    paper_paged: float
    bound: float


def end_of_prompt(longest: Longest, manager: Manager, eviction: Eviction) -> EndOfPrompt:
    """Compute one request's prompt in steps, and sample the pool at its end."""
    shape = read_shape(longest.shape)
    layout = layout_of(shape, PLANNED_BYTES, manager)
    sample, tokens = compute_prompt(shape, layout, longest.row, eviction)
    return EndOfPrompt(
        longest.shape,
        manager,
        tokens,
        sum(group.needed_bytes for group in sample.groups),
        sum(group.allocated_bytes for group in sample.groups),
        waste(sample.groups),
        sum(group.stranded_bytes for group in sample.groups),
        longest.paper,
        longest.bound,
    )


def compute_prompt(
    shape: Shape, layout: Layout, row: TraceRow, eviction: Eviction
) -> tuple[Sample, int]:
    """A sample of the pool when the row's prompt is computed, and the prompt's tokens."""
    core = MeteredCore(create_core(layout, eviction=eviction))
    prompt = PromptMaker([row], shape.images_in_text).prompt(0)
    spans = placed(row, shape.images_in_text).images
    core.begin_step(1)
    handle = core.open(prompt, "", images=np.asarray(spans, np.int32).reshape(-1, 3))
    core.claim(handle, len(prompt) + row.output_tokens)
    handles = np.asarray([handle], np.int32)
    for start in range(0, len(prompt), MAX_NUM_BATCHED_TOKENS):
        until = np.asarray([min(len(prompt), start + MAX_NUM_BATCHED_TOKENS)], np.int32)
        core.begin_step(2 + start // MAX_NUM_BATCHED_TOKENS)
        served, _ = core.grow(handles, until)
        if not served:
            raise RuntimeError(f"{layout.pool_bytes} bytes hold no {len(prompt)} tokens")
        core.advance(handles, until)
    meter = MemoryMeter(layout, shape.description.layers)
    return meter.sample(core.running(), core.totals(), leaves_waiting=False), len(prompt)


def conversations(traces: Path, eviction: Eviction) -> list[dict[str, Any]]:
    """The conversation trace on the shapes and memory sizes of :mod:`bench.replay.peers`."""
    rows = read_trace(traces / f"{AZURE}.jsonl.gz", REQUESTS[AZURE])
    return [
        asdict(row) | {"kvell": replayed(row, rows, "kvell", eviction)}
        for row in ROWS
        if row.trace == AZURE
    ]


def table_of_ends(ends: Sequence[EndOfPrompt]) -> Table:
    """A row for each shape and manager."""
    columns = ("tokens", "needed MiB", "allocated MiB", "waste %", "told or bound %")
    table = Table("shape", "manager", *columns, title="Waste at the end of the longest prompt")
    for end in ends:
        is_paged = end.manager == "paged"
        told = f"= {100 * end.paper_paged:.2f}" if is_paged else f"≤ {100 * end.bound}"
        mib = (f"{size / (1 << 20):,.1f}" for size in (end.needed_bytes, end.allocated_bytes))
        cells = (f"{end.tokens:,}", *mib, f"{100 * end.waste:.4f}", told)
        table.add_row(end.shape, end.manager, *cells)
    return table


def table_of_conversations(
    results: Sequence[dict[str, Any]], theirs: Mapping[Row, Mapping[str, float]]
) -> Table:
    """Ours beside vLLM's, where those were measured."""
    title = f"{AZURE}, first {REQUESTS[AZURE]} requests: Kvell / vLLM 0.32"
    columns = ("shape", "GiB", "waste %", "stranded %", "batch", "preemptions")
    table = Table(*columns, title=title)
    for result in results:
        ours = result["kvell"]
        peer = theirs.get(Row(result["shape"], result["trace"], result["memory_gib"]))
        waste, batch = (f"{100 * peer['waste']:.2f}", f"{peer['batch_mean']:.1f}") if peer else "––"
        table.add_row(
            result["shape"],
            str(result["memory_gib"]),
            f"{100 * ours['waste']:.2f} / {waste}",
            f"{100 * ours['stranded']:.2f}",
            f"{ours['batch_mean']:.1f} / {batch}",
            str(ours["preemptions"]),
        )
    table.add_row("mean", "", f"{100 * mean(one['kvell']['waste'] for one in results):.2f}")
    return table


def missed(
    ends: Sequence[EndOfPrompt],
    sizes: Sequence[dict[str, Packed]],
    results: Sequence[dict[str, Any]],
) -> list[str]:
    """The bounds that were not kept."""
    checks = {
        **{f"{end.shape}, {end.manager}, at the end of the prompt": _as_told(end) for end in ends},
        **{f"{MEMORY_GIB[i]} GiB packed": _is_packed(size) for i, size in enumerate(sizes)},
        **{result["shape"]: _is_tight(result["kvell"]) for result in results},
        "mean waste": mean(result["kvell"]["waste"] for result in results) <= MAX_WASTE_MEAN,
    }
    return [name for name, kept in checks.items() if not kept]


def _as_told(end: EndOfPrompt) -> bool:
    if end.manager == "paged":
        return abs(end.waste - end.paper_paged) <= PAPER_DIGIT
    return end.waste <= end.bound


def _is_packed(size: dict[str, Packed]) -> bool:
    ours = size["kvell"]
    beats_paged = ours.batch >= MIN_BATCH_OF_PAGED * size["paged"].batch
    return (
        ours.waste <= MAX_PACKING_WASTE
        and ours.batch >= MIN_BATCH_OF_IDEAL * size["ideal"].batch
        and (beats_paged or ours.memory_gib != PAGED_GIB)
    )


def _is_tight(report: dict[str, Any]) -> bool:
    return bool(report["waste"] <= MAX_WASTE and report["stranded"] <= MAX_STRANDED)


def main() -> None:
    """Measure, print the tables, and write every figure as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument(
        "--eviction", choices=EVICTIONS, default="lru", help="but with one page size"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    args = parser.parse_args()
    console = Console(width=140)
    rules: dict[Manager, Eviction] = {"kvell": args.eviction, "paged": "lru"}
    ends = [end_of_prompt(one, name, rules[name]) for one in LONGEST for name in MANAGERS_COMPARED]
    console.print(table_of_ends(ends))
    sizes = pack(args.eviction)
    console.print(table_of_packing(sizes))
    results = conversations(args.traces, args.eviction)
    console.print(table_of_conversations(results, vllm_figures(PEERS)))
    lines = missed(ends, sizes, results)
    console.print("\n".join(f"missed: {line}" for line in lines) or "All bounds are kept.")
    figures = {
        "end_of_prompt": [asdict(end) for end in ends],
        "packing": [{name: asdict(one) for name, one in size.items()} for size in sizes],
        "packing_of_the_paper": PAPER_PACKING,
        "conversations": results,
        "missed": lines,
    }
    result_file.write(args.out, figures, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
