"""Prefill and decode on one kind of instance or on two, with real processes on this machine.

Servers over HTTP in turn, each with as many instances and as many requests per second as the one
that it is compared with::

    python -m bench.pd.served --rounds 3
"""

import argparse
import asyncio
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.side_by_side.processes import SystemProcess
from kvell.cluster.instances import parse_instances
from kvell.load.arrivals import hang_ups, retimed
from kvell.load.driver import Load
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import Wire
from kvell.load.prompts import id_prompts
from kvell.load.report import Objectives, summary
from kvell.load.run import measure
from kvell.mempool.rendezvous import PdCaching
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow, predecessors

MODEL = "smollm2"
VOCABULARY = 49_152
WORKLOADS = ("sharegpt-like", "loogle-like", "react-like")
SHAPES: Mapping[int, tuple[str, ...]] = {
    2: ("mixed=2", "prefill=1,decode=1"),
    3: ("mixed=3", "prefill=1,decode=2", "prefill=2,decode=1"),
}
"""By number of instances; the first of each is what the others are compared with."""
CACHINGS: tuple[PdCaching, ...] = (0, 3)
START_SECONDS = 180.0
KVELL = [sys.executable, "-m", "kvell.cli.main"]
FIGURES = {"jct": "e2e_seconds", "ttft": "ttft_seconds", "tpot": "tpot_seconds"}
PARTS = ("mean", "p99")


@dataclass(frozen=True)
class System:
    """A server.

    :param caching: ``--pd-caching``; None if it has no prefill and decode instances.
    """

    instances: str
    caching: PdCaching | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        return (
            self.instances if self.caching is None else f"{self.instances} caching {self.caching}"
        )

    @property
    def count(self) -> int:
        """Number of instances."""
        return sum(parse_instances(self.instances).values())

    def flags(self) -> list[str]:
        """Flags of ``kvell serve``."""
        own = [] if self.caching is None else [f"--pd-caching={self.caching}"]
        return [f"--instances={self.instances}", *own]


def systems_of(counts: Sequence[int], cachings: Sequence[PdCaching]) -> list[System]:
    """All systems with so many instances; what others are compared with is first of its count."""
    found = []
    for shape in (shape for count in counts for shape in SHAPES[count]):
        is_split = "prefill" in parse_instances(shape)
        found += [System(shape, one) for one in (cachings if is_split else (None,))]
    return found


def shortened(rows: Sequence[TraceRow], divisor: int) -> list[TraceRow]:
    """The same sessions with shorter texts: what each turn adds, and its answer, are divided."""
    found: list[TraceRow] = []
    for row, before in zip(rows, predecessors(rows), strict=True):
        goes_on = row.continues and before is not None
        old = rows[before].num_tokens if goes_on and before is not None else 0
        new = found[before].num_tokens if goes_on and before is not None else 0
        block_tokens = row.block_tokens // divisor
        named = len(row.block_ids) * block_tokens
        found.append(
            replace(
                row,
                prompt_tokens=new + max(1, named, (row.prompt_tokens - old) // divisor),
                output_tokens=max(2, row.output_tokens // divisor),
                block_ids=row.block_ids if block_tokens else row.block_ids[:0],
                block_tokens=block_tokens,
            )
        )
    return found


def rows_of(
    workload: str, count: int, divisor: int, rate_per_instance: float, instances: int, seed: int
) -> list[TraceRow]:
    """Requests of one round, as a Poisson process; the texts are the same for every system."""
    rows = shortened(generate_trace(workload, count, seed), divisor)
    return retimed(rows, rate=rate_per_instance * instances, seed=seed)


def measured(
    system: System, flags: Sequence[str], rows: Sequence[TraceRow], seed: int, folder: Path
) -> dict[str, Any]:
    """Start a server, load it, end it; what its clients saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*KVELL, "serve", "--model", MODEL, "--port", str(port), *system.flags(), *flags]
    process = SystemProcess(command, folder / "server.log", {})
    try:
        process.wait_for(f"{url}/health", START_SECONDS)
        return asyncio.run(_loaded(url, rows, seed))
    finally:
        process.end()


async def _loaded(url: str, rows: Sequence[TraceRow], seed: int) -> dict[str, Any]:
    client = HttpClient(url)
    wire = Wire(MODEL, extra={"return_token_ids": True})
    prompts = id_prompts(rows, seed, VOCABULARY, lambda _text: [])
    try:
        told = await measure(client, url, wire, prompts, Load(rows, hang_ups(rows, 0.0)))
    finally:
        client.close()
    return summary(told.outcomes, Objectives())


Run = dict[str, Any]


def row_of(system: System, runs: Sequence[Run]) -> dict[str, Any]:
    """Medians of a system's rounds, and the range of its mean job completion time."""
    found: dict[str, Any] = {"system": system.name, "instances": system.count}
    for name, figure in FIGURES.items():
        for part in PARTS:
            found[f"{name}_{part}_seconds"] = median(one[figure][part] for one in runs)
    means = [one["e2e_seconds"]["mean"] for one in runs]
    return found | {
        "jct_mean_range_seconds": [min(means), max(means)],
        "hits": median(one["cached_share"] or 0.0 for one in runs),
        "failed": sum(one["failed"] for one in runs),
    }


def compared(runs: Sequence[Run], beside: Sequence[Run]) -> dict[str, list[float]]:
    """Figures over those of another system, round by round: median, lowest and highest ratio."""
    found = {}
    for name, figure in FIGURES.items():
        for part in PARTS:
            ratios = [
                one[figure][part] / two[figure][part] for one, two in zip(runs, beside, strict=True)
            ]
            found[f"{name}_{part}"] = [median(ratios), min(ratios), max(ratios)]
    return found


def comparisons(runs: Mapping[System, Sequence[Run]]) -> dict[str, dict[str, list[float]]]:
    """Every system beside the first with as many instances."""
    found = {}
    for system, own in runs.items():
        first = next(one for one in runs if one.count == system.count)
        if system is not first:
            found[f"{system.name} / {first.name}"] = compared(own, runs[first])
    return found


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", choices=WORKLOADS, default=WORKLOADS[0])
    parser.add_argument("--requests", type=int, default=60, help="of a round")
    parser.add_argument("--shorter", type=int, default=8, help="divisor of all lengths")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s per instance")
    parser.add_argument("--instances", type=int, nargs="+", choices=list(SHAPES), default=[2])
    parser.add_argument("--caching", type=int, nargs="+", default=list(CACHINGS))
    parser.add_argument("--kv-memory", default="256MiB", help="of each instance")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, default=result_file.path_of("pd_served"))
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Print a table and the comparisons, and write them to the bench's result file."""
    args = arguments(given)
    systems = systems_of(args.instances, args.caching)
    runs: dict[System, list[Run]] = {system: [] for system in systems}
    flags = [f"--kv-memory={args.kv_memory}", f"--dtype={args.dtype}"]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for system in systems if number % 2 == 0 else systems[::-1]:
                asked = (args.workload, args.requests, args.shorter, args.rate)
                rows = rows_of(*asked, system.count, seed=number)
                runs[system].append(measured(system, flags, rows, number, Path(folder)))
    told = [row_of(system, own) for system, own in runs.items()]
    ratios = comparisons(runs)
    setting = {key: value for key, value in vars(args).items() if key != "json"}
    result_file.write(args.json, {"setting": setting, "rows": told, "ratios": ratios})
    table = Table(*told[0], title=f"{args.workload} / {args.shorter}, medians of {args.rounds}")
    for each in told:
        table.add_row(*(_shown(value) for value in each.values()))
    Console(width=200).print(table)
    for name, figures in ratios.items():
        parts = (
            f"{key} {mid:.2f} ({low:.2f}–{high:.2f})" for key, (mid, low, high) in figures.items()
        )
        Console(width=200).print(f"{name}: {', '.join(parts)}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "–".join(f"{one:.3g}" for one in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
