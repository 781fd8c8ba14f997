"""What of the manager's time is the eviction rule that learns? CPU time, rules in turn.

Run from the repository's root: ``python -m bench.replay.rule_cost --traces DIR``.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.cpu_clock import CpuClock
from bench.replay.hits import TRACES, full_pool_bytes, run
from bench.replay.shapes import AMPLE_BYTES, Shape, layout_of, read_shape, replayed
from kvell.memory import Eviction
from kvell.simulator.rows import TraceRow
from kvell.simulator.trace import read_trace

RESULTS = Path("bench", "results", "rule_cost.json")
RULES: tuple[Eviction, ...] = ("lru", "hazard")
SHAPES = ("llama3-8b", "gemma3-27b", "qwen3-next")


def measured(
    shape: Shape, trace: str, rows: Sequence[TraceRow], rounds: int
) -> dict[str, list[float]]:
    """Microseconds of the manager for a request and step, by rule and round."""
    layout = layout_of(shape, full_pool_bytes(run(shape, trace, rows, AMPLE_BYTES)))
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _ in range(rounds):
        for rule in RULES:
            report, _ = replayed(shape, layout, rows, eviction=rule, clock=CpuClock())
            found[rule].append(report["manager_us_per_request_step"])
    return found


def share(found: dict[str, list[float]]) -> dict[str, float]:
    """What the rule adds, as a part of the manager's time with it: best and middle rounds."""
    (plain, learned) = (found[rule] for rule in RULES)
    return {
        "best": 1 - min(plain) / min(learned),
        "median": 1 - statistics.median(plain) / statistics.median(learned),
    }


def main() -> None:
    """Prints and writes every shape and trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--trace", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args()
    told = []
    for trace in options.trace:
        rows = read_trace(options.traces / f"{trace}.jsonl.gz", TRACES[trace])
        for name in options.shapes:
            found = measured(read_shape(name), trace, rows, options.rounds)
            parts = share(found)
            told.append({"shape": name, "trace": trace, "us": found, "share": parts})
            least = ", ".join(f"{rule} {min(found[rule]):.2f}" for rule in RULES)
            print(
                f"{name}, {trace}: {least} µs per request and step (best of {options.rounds}); "
                f"the rule {100 * parts['best']:.1f} % (median {100 * parts['median']:.1f} %)",
                flush=True,
            )
    options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
