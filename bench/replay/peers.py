"""Our manager beside vLLM 0.32's on the same traces, shapes and memory sizes.

Run from the repository's root: ``python -m bench.replay.peers --traces DIR``.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
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

RESULTS = Path("bench", "results", "replay_peers.json")
ELEMENT_BYTES = 2
AZURE, MOONCAKE = "azure-2023-conv", "mooncake-conversation"
REQUESTS = {AZURE: 1000, MOONCAKE: 500}
ROUNDS = 5
"""Over all traces: CPU time is the best of them and the median; all else is the same in each."""
US = "manager_us_per_request_step"


@dataclass(frozen=True)
class Peer:
    """What vLLM 0.32's manager did: waste as a fraction, CPU in µs per request-step."""

    shape: str
    trace: str
    memory_gib: int
    batch: float
    hit_rate: float
    waste: float
    manager_us: float


VLLM = (
    Peer("llama3-8b", AZURE, 16, 99.0, 0, 0.006, 4.9),
    Peer("gemma3-27b", AZURE, 24, 44.4, 0, 0.122, 22.8),
    Peer("ministral-8b", AZURE, 16, 89.0, 0, 0.006, 13.1),
    Peer("gpt-oss-20b", AZURE, 4, 112.0, 0, 0.020, 10.7),
    Peer("llama4-scout", AZURE, 24, 99.0, 0, 0.006, 13.1),
    Peer("jamba-mini", AZURE, 3, 97.7, 0, 0.043, 43.6),
    Peer("qwen3-next", AZURE, 6, 76.9, 0, 0.098, 16.5),
    Peer("nemotron-h-8b", AZURE, 6, 45.0, 0, 0.090, 39.5),
    Peer("llama3-8b", MOONCAKE, 40, 18.8, 0.036, 0.001, 11.3),
    Peer("gemma3-27b", MOONCAKE, 32, 16.0, 0.036, 0.051, 41.5),
    Peer("ministral-8b", MOONCAKE, 40, 19.8, 0.036, 0.001, 39.6),
    Peer("gpt-oss-20b", MOONCAKE, 12, 28.2, 0.036, 0.004, 18.7),
    Peer("llama4-scout", MOONCAKE, 24, 18.1, 0.036, 0.005, 40.0),
    Peer("jamba-mini", MOONCAKE, 6, 21.6, 0.031, 0.005, 35.8),
    Peer("qwen3-next", MOONCAKE, 12, 25.7, 0, 0.017, 17.8),
    Peer("nemotron-h-8b", MOONCAKE, 16, 35.5, 0, 0.025, 30.9),
)
"""Measured on 2026-11-20 on two disturbed cores: its µs may vary twofold."""


def replay_like(
    peer: Peer, rows: Sequence[TraceRow], manager: Manager, eviction: Eviction
) -> dict[str, Any]:
    """Replay the peer's trace on its shape and memory; our figures."""
    config = read_config(Path(named_config(peer.shape)))
    description = describe(config, ELEMENT_BYTES)
    layout = plan_layout(description.layers, peer.memory_gib * GIB, manager=manager)
    device = Machine(load_profile(DEFAULT_HARDWARE), model_cost(config, description, ELEMENT_BYTES))
    limits = replay_limits(layout, description.max_model_len)
    core = create_core(layout, eviction=eviction)
    run = Replay(core, description.layers, limits, rows, "start", device, MonotonicClock())
    run.run()
    return run.report()


def measure_rounds(
    traces: Path, manager: Manager, eviction: Eviction, shapes: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """One result for each row of vLLM's table, the quickest of its rounds."""
    found = [measure(traces, manager, eviction, shapes) for _ in range(rounds)]
    return [quickest(results) for results in zip(*found, strict=True)]


def quickest(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row's round with least CPU time, and the median of all."""
    if "refused" in results[0]:
        return results[0]
    best = min(results, key=lambda result: float(result["kvell"][US]))
    return best | {"median_us": median(float(result["kvell"][US]) for result in results)}


def measure(
    traces: Path, manager: Manager, eviction: Eviction, shapes: Sequence[str]
) -> list[dict[str, Any]]:
    """One result for each row of vLLM's table, with a reason where a shape cannot run."""
    rows = {name: read_trace(traces / f"{name}.jsonl.gz", n) for name, n in REQUESTS.items()}
    results = []
    for peer in VLLM:
        if shapes and peer.shape not in shapes:
            continue
        result: dict[str, Any] = {"manager": manager, "vllm": vars(peer)}
        try:
            result["kvell"] = replay_like(peer, rows[peer.trace], manager, eviction)
        except ChangeSomething as error:
            result["refused"] = str(error)
        results.append(result)
    return results


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """Ours / theirs, a row for each shape and trace."""
    table = Table(title="Kvell / vLLM 0.32")
    names = ("batch", "hit rate", "waste %", "stranded %", "µs (median)", "preemptions")
    for name in ("shape", "trace", "GiB", *names):
        table.add_column(name)
    for result in results:
        peer, ours = result["vllm"], result.get("kvell")
        if ours:
            cells = _cells(peer, ours, result["median_us"])
            table.add_row(peer["shape"], peer["trace"], str(peer["memory_gib"]), *cells)
    return table


def _cells(peer: dict[str, Any], ours: dict[str, Any], median_us: float) -> list[str]:
    return [
        f"{ours['batch_mean']:.1f} / {peer['batch']}",
        f"{ours['hit_rate']:.3f} / {peer['hit_rate']}",
        f"{100 * ours['waste']:.2f} / {100 * peer['waste']:.1f}",
        f"{100 * ours['stranded']:.2f}",
        f"{ours[US]:.2f} ({median_us:.2f}) / {peer['manager_us']}",
        str(ours["preemptions"]),
    ]


def main() -> None:
    """Replay, print the table, and write every figure as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--manager", choices=MANAGERS, default="kvell")
    parser.add_argument("--eviction", choices=EVICTIONS, default="lru")
    parser.add_argument("--shape", action="append", default=[], help="only this shape")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    results = measure_rounds(args.traces, args.manager, args.eviction, args.shape, args.rounds)
    Console(width=140).print(table_of(results))
    print(machine.describe())
    for reason in sorted({result["refused"] for result in results if "refused" in result}):
        print(f"not run: {reason}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
