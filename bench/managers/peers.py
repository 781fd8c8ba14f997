"""Our manager beside vLLM's in one run: batch, hits, waste, and CPU time per request and step.

Run from the repository's root: ``python -m bench.managers.peers --traces DIR --vllm-env DIR``.
The shapes, traces and memory sizes are those of ``bench.replay.peers``; a row's two sides run one
after the other, since figures of a disturbed machine compare only side by side.  ``--orders``
asks vLLM's manager once in each order of scheduling, ``--whole`` replays whole traces.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.managers.ours import outcome
from bench.managers.peer.job import Order
from bench.managers.theirs import PEER_SHAPES, Peer, peer_job
from bench.replay.peers import AZURE, REQUESTS, ROWS, US
from bench.replay.shapes import read_shape
from kvell.simulator.traces.trace import read_trace
from kvell.vocabulary import GIB

RESULTS = result_file.path_of("managers_peers")
LEAST_BATCH = {"nemotron-h-8b": 47, "qwen3-next": 80, "gemma3-27b": 48, "jamba-mini": 97}
"""On the Azure trace, means over all steps."""
SLOW_US, OF_SLOW, OF_FAST = 20.0, 1 / 10, 1 / 3
"""Bounds on our CPU time: a tenth of vLLM's where that is 20 µs or more, else a third."""
QUICK_REQUESTS = 60

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Both sides of one row; several runs of each where their time was measured again."""

    shape: str
    trace: str
    memory_gib: int
    ours: Sequence[Figures]
    theirs: Mapping[Order, Sequence[Figures]]

    @property
    def ours_us(self) -> float:
        """The best of our runs."""
        return min(float(one[US]) for one in self.ours)

    @property
    def theirs_us(self) -> float:
        """The best of vLLM's runs, in our order of scheduling."""
        return min(float(one[US]) for one in self.theirs["decodes-first"])

    @property
    def most_us(self) -> float:
        """Most µs that ours may take."""
        return self.theirs_us * (OF_SLOW if self.theirs_us >= SLOW_US else OF_FAST)


def problems(rows: Sequence[Row]) -> Iterator[str]:
    """The bounds that were not kept."""
    for row in rows:
        name, batch = f"{row.shape} on {row.trace}", float(row.ours[0]["batch_mean"])
        if row.ours_us > row.most_us:
            yield f"{name}: {row.ours_us:.2f} µs, {row.most_us:.2f} allowed"
        if row.trace == AZURE and batch < LEAST_BATCH.get(row.shape, 0):
            yield f"{name}: batch {batch:.1f}, {LEAST_BATCH[row.shape]} asked"


def table_of(rows: Sequence[Row]) -> Table:
    """Ours / theirs."""
    columns = ("shape", "trace", "GiB", "batch", "steps", "hit rate", "waste %", "µs", "part")
    table = Table(*columns, title="Kvell / vLLM 0.32, one run")
    for row in rows:
        for order, runs in row.theirs.items():
            ours, theirs = row.ours[0], runs[0]
            table.add_row(
                row.shape,
                row.trace if order == "decodes-first" else f"{row.trace}, {order}",
                str(row.memory_gib),
                f"{ours['batch_mean']:.1f} / {theirs['batch_mean']:.1f}",
                f"{ours['steps']} / {theirs['steps']}",
                f"{ours['hit_rate']:.3f} / {theirs['hit_rate']:.3f}",
                f"{100 * ours['waste']:.2f} / {100 * theirs['waste']:.2f}",
                f"{row.ours_us:.2f} / {row.theirs_us:.1f}",
                f"1/{row.theirs_us / row.ours_us:.0f}",
            )
    return table


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Measure row after row."""
    orders: tuple[Order, ...] = (
        ("decodes-first", "admission") if args.orders else ("decodes-first",)
    )
    with Peer(args.vllm_env) as peer:
        for row in ROWS:
            if (args.shape and row.shape not in args.shape) or row.trace in (args.without or ()):
                continue
            shape, path = read_shape(row.shape), args.traces / f"{row.trace}.jsonl.gz"
            limit = None if args.whole else QUICK_REQUESTS if args.quick else REQUESTS[row.trace]
            rows = read_trace(path, limit)
            memory = row.memory_gib * GIB
            ours, theirs = [], {order: [] for order in orders}  # type: ignore[var-annotated]
            for turn in range(args.repeats):
                ours.append(outcome(shape, rows, memory, "kvell"))
                for order in orders if turn == 0 else orders[:1]:
                    job = peer_job(shape, path, len(rows), memory, order=order)
                    theirs[order].append(peer.run(job))
            yield Row(row.shape, row.trace, row.memory_gib, ours, theirs)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument(
        "--vllm-env", type=Path, required=True, help="what bench.managers.environment made"
    )
    parser.add_argument("--shape", action="append", choices=PEER_SHAPES, help="only this shape")
    parser.add_argument("--without", action="append", choices=REQUESTS, help="not this trace")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the best time counts")
    parser.add_argument("--orders", action="store_true", help="vLLM in both orders of scheduling")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--whole", action="store_true", help="whole traces")
    size.add_argument("--quick", action="store_true", help="60 requests of each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    return parser.parse_args()


def main() -> None:
    """Measure; print and write after every row, so that an interrupted run has what it had."""
    args, rows = arguments(), []
    for row in measure(args):
        rows.append(row)
        missed = list(problems(rows))
        told = {"missed": missed, "rows": [vars(one) for one in rows]}
        result_file.write(args.out, told)
        print(f"{row.shape} {row.trace}: {row.ours_us:.2f} / {row.theirs_us:.1f} µs", flush=True)
    Console(width=150).print(table_of(rows))
    print("\n".join(missed) or "every bound is kept")


if __name__ == "__main__":
    main()
