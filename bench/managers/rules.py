"""Eviction rules in pools of several groups: least recently used, learned, and with hints.

Run from the repository's root: ``python -m bench.managers.rules --traces DIR``.  The same rows,
memory and scheduler; only the rule of eviction differs.  Memory is in mean requests, as in the
matrix.  Time is CPU time inside the manager, the best of ``--times`` turns.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.managers.cells import SIZES, memory_bytes
from bench.managers.ours import replayed
from bench.replay.shapes import Shape, read_shape
from kvell.memory import Eviction, create_core
from kvell.simulator.traces.hints import hinted
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("eviction_pools")
SHAPES = ("llama3-8b", "gemma3-27b", "qwen3-next")
TRACES = {
    "mooncake-conversation": 600,
    "mooncake-synthetic": 600,
    "coding-assistant": 300,
    "azure-2023-conv": 1000,
}
WRONG_HINTS = 0.1
RULES: dict[str, tuple[Eviction, float | None]] = {
    "lru": ("lru", None),
    "hazard": ("hazard", None),
    "hazard + hints": ("hazard", WRONG_HINTS),
}
"""By name, the rule and the part of hints that is wrong."""


@dataclass(frozen=True)
class Outcome:
    """One replay.

    :ivar size: memory in mean requests.
    :ivar manager_us: per request and step.
    """

    shape: str
    trace: str
    size: int
    rule: str
    hit_rate: float
    batch_mean: float
    steps: int
    preemptions: int
    manager_us: float


def measured(
    shape: Shape, trace: str, rows: Sequence[TraceRow], size: int, times: int
) -> list[Outcome]:
    """Run every rule in one pool, in turns."""
    pool_bytes = memory_bytes(shape, rows, size)
    found: dict[str, Outcome] = {}
    for _ in range(times):
        for name, (eviction, wrong) in RULES.items():
            told = rows if wrong is None else hinted(rows, wrong)
            one = _outcome(shape, trace, told, size, name, pool_bytes, eviction)
            best = found.get(name)
            if best is None or one.manager_us < best.manager_us:
                found[name] = one
    return list(found.values())


def _outcome(
    shape: Shape,
    trace: str,
    rows: Sequence[TraceRow],
    size: int,
    rule: str,
    pool_bytes: int,
    eviction: Eviction,
) -> Outcome:
    run = replayed(
        shape,
        rows,
        pool_bytes,
        "kvell",
        core_of=lambda layout: create_core(layout, "auto", eviction),
    )
    report = run.report()
    return Outcome(
        shape.name,
        trace,
        size,
        rule,
        report["hit_rate"],
        report["batch_mean"],
        report["steps"],
        report["preemptions"],
        report["manager_us_per_request_step"],
    )


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A line for each pool, a column for each rule: hits, steps, and what the rule costs."""
    table = Table(title="Prefix hit rate · steps · µs of the manager, of the first")
    for column in ("shape", "trace", "memory", *RULES):
        table.add_column(column)
    pools: dict[tuple[str, str, int], dict[str, Outcome]] = {}
    for one in outcomes:
        pools.setdefault((one.shape, one.trace, one.size), {})[one.rule] = one
    for (shape, trace, size), of_rule in pools.items():
        table.add_row(shape, trace, f"{size} requests", *_cells(of_rule))
    return table


def _cells(of_rule: Mapping[str, Outcome]) -> list[str]:
    first = next(iter(of_rule.values()))
    return [
        f"{one.hit_rate:.4f} · {one.steps:,} · {one.manager_us / first.manager_us:.2f}"
        for one in of_rule.values()
    ]


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--shape", action="append", default=[], help="only this shape")
    parser.add_argument("--trace", action="append", default=[], help="only this trace")
    parser.add_argument("--size", action="append", type=int, default=[], help="only this memory")
    parser.add_argument("--requests", type=int, help="of each trace at most")
    parser.add_argument("--times", type=int, default=1, help="turns, the fastest of which counts")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the JSON goes")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    for trace in args.trace or TRACES:
        count = min(TRACES.get(trace, 1000), args.requests or 10**9)
        rows = read_trace(args.traces / f"{trace}.jsonl.gz", count)
        for name in args.shape or SHAPES:
            for size in args.size or SIZES:
                outcomes += measured(read_shape(name), trace, rows, size, args.times)
                Console(width=140).print(table_of(outcomes[-len(RULES) :]))
    Console(width=140).print(table_of(outcomes))
    result_file.write(args.json, [asdict(one) for one in outcomes])


if __name__ == "__main__":
    main()
