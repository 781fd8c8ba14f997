"""Prefix hits by default: at the second request, on real traffic, and in a pool that is full.

Run from the repository's root: ``python -m bench.replay.hits --traces DIR``.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.replay.probes import probe
from bench.replay.shapes import AMPLE_BYTES, SHAPES, Shape, layout_of, read_shape, replayed
from kvell.memory import EVICTIONS, Eviction, GroupKind
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow, ideal_hit_rate, ideal_hit_tokens
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("hits", result_file.VIRTUAL)
TREE, TREE_REQUESTS, TREE_SEED = "tree", 600, 1
TRACES = {"mooncake-conversation": 600, "coding-assistant": 300}
FULL_POOL = 4
"""A full pool is this multiple of what running requests need on average with ample memory."""
YARDSTICK = "llama3-8b"
"""The attention-only shape whose hits a full pool is measured against."""


@dataclass(frozen=True)
class Run:
    """One shape, one trace, one pool.

    :param hits_of_ideal: prefix-hit tokens, as a part of what a cache without end hits.
    :param checkpoint_bytes_per_hit_token: bytes of checkpointed states per hit token.
    """

    shape: str
    trace: str
    pool_bytes: int
    hit_rate: float
    hits_of_ideal: float
    needed_bytes_mean: float
    checkpoint_bytes_per_hit_token: float


def load(traces: Path) -> dict[str, list[TraceRow]]:
    """The traces, by name."""
    rows = {name: read_trace(traces / f"{name}.jsonl.gz", n) for name, n in TRACES.items()}
    return rows | {TREE: generate_trace(TREE, TREE_REQUESTS, TREE_SEED)}


def ideal_rate(name: str, rows: Sequence[TraceRow]) -> float:
    """Hit rate of a cache that never forgets; counted in tokens for the tree."""
    if name != TREE:
        return ideal_hit_rate(rows)
    return ideal_hit_tokens(rows) / sum(row.prompt_tokens for row in rows)


def run(
    shape: Shape,
    name: str,
    rows: Sequence[TraceRow],
    pool_bytes: int,
    eviction: Eviction = "lru",
) -> Run:
    """Replay a trace in a pool."""
    layout = layout_of(shape, pool_bytes)
    report, replay = replayed(shape, layout, rows, eviction=eviction)
    totals = replay.totals()
    written_bytes = sum(
        pages * group.page_stride_bytes
        for pages, group in zip(totals.checkpoint_pages, layout.groups, strict=True)
        if group.kind is GroupKind.STATE
    )
    return Run(
        shape.name,
        name,
        pool_bytes,
        report["hit_rate"],
        report["hit_rate"] / ideal_rate(name, rows),
        sum(group["needed_bytes_mean"] for group in report["groups"]),
        written_bytes / max(1, totals.hit_tokens),
    )


def full_pool_bytes(ample: Run) -> int:
    """Bytes of the full pool, from the run with ample memory."""
    return int(FULL_POOL * ample.needed_bytes_mean)


def measure(
    traces: dict[str, list[TraceRow]], names: Sequence[str], eviction: Eviction = "lru"
) -> list[tuple[Run, Run]]:
    """For every trace and shape the run with ample memory and the one in a full pool."""
    pairs = []
    for trace, rows in traces.items():
        for name in names:
            shape = read_shape(name)
            ample = run(shape, trace, rows, AMPLE_BYTES)
            rule: Eviction = "lru" if name == YARDSTICK else eviction
            full = run(shape, trace, rows, full_pool_bytes(ample), rule)
            pairs.append((ample, full))
    return pairs


def against(pairs: Sequence[tuple[Run, Run]]) -> dict[str, float]:
    """Hit rate of the yardstick in its full pool, by trace."""
    return {full.trace: full.hit_rate for _, full in pairs if full.shape == YARDSTICK}


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--shape", action="append", default=[], help="only this shape")
    parser.add_argument("--trace", action="append", default=[], help="only this trace")
    parser.add_argument(
        "--eviction",
        choices=EVICTIONS,
        default="lru",
        help="of single requests and in full pools, but for the yardstick's",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    args = parser.parse_args()
    names = args.shape or SHAPES
    console = Console(width=140)
    probes = {
        name: probe(layout_of(read_shape(name), AMPLE_BYTES), args.eviction) for name in names
    }
    table = Table(title="Tokens hit, memory to spare")
    for column in ("shape", *next(iter(probes.values()))):
        table.add_column(column)
    for name, hits in probes.items():
        table.add_row(name, *map(str, hits.values()))
    console.print(table)
    traces = {n: rows for n, rows in load(args.traces).items() if n in args.trace or not args.trace}
    pairs = measure(traces, names, args.eviction)
    yardstick = against(pairs)
    table = Table(title="Hits on traces")
    for column in ("trace", "shape", "of ideal, ample", "checkpoint B per hit token", "full pool"):
        table.add_column(column)
    table.add_column(f"full pool / {YARDSTICK}")
    results = []
    for ample, full in pairs:
        part = full.hit_rate / yardstick[full.trace] if full.trace in yardstick else 0.0
        results.append({"ample": asdict(ample), "full": asdict(full), "of_yardstick": part})
        cells = (f"{ample.hits_of_ideal:.4f}", f"{ample.checkpoint_bytes_per_hit_token:,.0f}")
        table.add_row(ample.trace, ample.shape, *cells, f"{full.hit_rate:.4f}", f"{part:.3f}")
    console.print(table)
    result_file.write(
        args.out, {"probes": probes, "traces": results}, processor=result_file.VIRTUAL
    )


if __name__ == "__main__":
    main()
