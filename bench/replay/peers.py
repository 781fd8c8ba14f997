"""Our manager on two traces and eight shapes, beside vLLM's figures where those were measured.

Run from the repository's root: ``python -m bench.replay.peers --traces DIR``.  vLLM's manager is
measured by :mod:`bench.managers.peers`; its file is read here, not run again.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from kvell.cli.replay.command import named_config, replay_limits
from kvell.clock import MonotonicClock
from kvell.errors import ChangeSomething
from kvell.memory import EVICTIONS, MANAGERS, Eviction, Manager, create_core, plan_layout
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay.replay import Replay
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.trace import TraceRow, read_trace
from kvell.vocabulary import GIB

RESULTS, PEERS = result_file.path_of("replay_peers"), result_file.path_of("managers_peers")
ELEMENT_BYTES = 2
AZURE, MOONCAKE = "azure-2023-conv", "mooncake-conversation"
REQUESTS = {AZURE: 1000, MOONCAKE: 500}
ROUNDS = 5
"""Of all replays. CPU time is given as their best and median; all else is the same in each."""
US = "manager_us_per_request_step"
COMPARED = ("batch_mean", "hit_rate", "waste")


@dataclass(frozen=True)
class Row:
    """One replay: a shape of ``bench/configs``, a trace, and the memory for KV and states."""

    shape: str
    trace: str
    memory_gib: int


ROWS = (
    Row("llama3-8b", AZURE, 16),
    Row("gemma3-27b", AZURE, 24),
    Row("ministral-8b", AZURE, 16),
    Row("gpt-oss-20b", AZURE, 4),
    Row("llama4-scout", AZURE, 24),
    Row("jamba-mini", AZURE, 3),
    Row("qwen3-next", AZURE, 6),
    Row("nemotron-h-8b", AZURE, 6),
    Row("llama3-8b", MOONCAKE, 40),
    Row("gemma3-27b", MOONCAKE, 32),
    Row("ministral-8b", MOONCAKE, 40),
    Row("gpt-oss-20b", MOONCAKE, 12),
    Row("llama4-scout", MOONCAKE, 24),
    Row("jamba-mini", MOONCAKE, 6),
    Row("qwen3-next", MOONCAKE, 12),
    Row("nemotron-h-8b", MOONCAKE, 16),
)


def vllm_figures(path: Path) -> dict[Row, dict[str, float]]:
    """Figures of vLLM's manager by row, from the file of :mod:`bench.managers.peers`.

    CPU time is the best of its runs. Empty if there is no such file.
    """
    if not path.exists():
        return {}
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        runs = row["theirs"]["decodes-first"]
        if "refused" not in runs[0]:
            best = {US: min(run[US] for run in runs)}
            key = Row(row["shape"], row["trace"], row["memory_gib"])
            found[key] = {name: runs[0][name] for name in COMPARED} | best
    return found


def replayed(
    row: Row, rows: Sequence[TraceRow], manager: Manager, eviction: Eviction
) -> dict[str, Any]:
    """Replay a trace on a row's shape and memory; returns the report."""
    config = read_config(Path(named_config(row.shape)))
    description = describe(config, ELEMENT_BYTES)
    layout = plan_layout(description.layers, row.memory_gib * GIB, manager=manager)
    device = Machine(load_profile(DEFAULT_HARDWARE), model_cost(config, description, ELEMENT_BYTES))
    limits = replay_limits(layout, description.max_model_len)
    core = create_core(layout, eviction=eviction)
    run = Replay(core, description.layers, limits, rows, "start", device, MonotonicClock())
    run.run()
    return run.report()


def measure_rounds(
    traces: Path, manager: Manager, eviction: Eviction, shapes: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """One result for each of ``ROWS``: the quickest of its rounds."""
    found = [measure(traces, manager, eviction, shapes) for _ in range(rounds)]
    return [quickest(results) for results in zip(*found, strict=True)]


def quickest(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round with the least CPU time, and the median time of all rounds."""
    if "refused" in results[0]:
        return results[0]
    best = min(results, key=lambda result: float(result["kvell"][US]))
    return best | {"median_us": median(float(result["kvell"][US]) for result in results)}


def measure(
    traces: Path, manager: Manager, eviction: Eviction, shapes: Sequence[str]
) -> list[dict[str, Any]]:
    """One result for each of ``ROWS``, with a reason where a shape cannot run."""
    rows = {name: read_trace(traces / f"{name}.jsonl.gz", n) for name, n in REQUESTS.items()}
    results = []
    for row in ROWS:
        if shapes and row.shape not in shapes:
            continue
        result: dict[str, Any] = {"manager": manager, **vars(row)}
        try:
            result["kvell"] = replayed(row, rows[row.trace], manager, eviction)
        except ChangeSomething as error:
            result["refused"] = str(error)
        results.append(result)
    return results


def table_of(results: Sequence[dict[str, Any]], theirs: Mapping[Row, Mapping[str, float]]) -> Table:
    """Ours / vLLM's, a line for each shape and trace."""
    table = Table(title="Kvell / vLLM 0.32")
    names = ("batch", "hit rate", "waste %", "stranded %", "µs (median)", "preemptions")
    for name in ("shape", "trace", "GiB", *names):
        table.add_column(name)
    for result in results:
        if ours := result.get("kvell"):
            row = Row(result["shape"], result["trace"], result["memory_gib"])
            cells = _cells(theirs.get(row, {}), ours, result["median_us"])
            table.add_row(row.shape, row.trace, str(row.memory_gib), *cells)
    return table


def _cells(theirs: Mapping[str, float], ours: dict[str, Any], median_us: float) -> list[str]:
    def beside(name: str, pattern: str, scale: int = 1) -> str:
        return pattern.format(scale * theirs[name]) if name in theirs else "–"

    return [
        f"{ours['batch_mean']:.1f} / {beside('batch_mean', '{:.1f}')}",
        f"{ours['hit_rate']:.3f} / {beside('hit_rate', '{:.3f}')}",
        f"{100 * ours['waste']:.2f} / {beside('waste', '{:.2f}', 100)}",
        f"{100 * ours['stranded']:.2f}",
        f"{ours[US]:.2f} ({median_us:.2f}) / {beside(US, '{:.1f}')}",
        str(ours["preemptions"]),
    ]


def main() -> None:
    """Replay, print the table, and write every figure as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--manager", choices=MANAGERS, default="kvell")
    parser.add_argument("--eviction", choices=EVICTIONS, default="lru")
    parser.add_argument("--shape", action="append", default=[], help="only this shape")
    parser.add_argument("--vllm", type=Path, default=PEERS, help="what bench.managers.peers wrote")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    results = measure_rounds(args.traces, args.manager, args.eviction, args.shape, args.rounds)
    Console(width=140).print(table_of(results, vllm_figures(args.vllm)))
    print(machine.describe())
    for reason in sorted({result["refused"] for result in results if "refused" in result}):
        print(f"not run: {reason}")
    result_file.write(args.out, results)


if __name__ == "__main__":
    main()
