"""The part of the manager's time that the learned eviction rule takes.

Run from the repository's root: ``python -m bench.replay.rule_cost --traces DIR``.  Both rules
replay the same trace side by side, some steps of the one and some of the other in turn: what the
machine's neighbours do for seconds falls on both.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import result_file
from bench.replay.hits import TRACES, full_pool_bytes, run
from bench.replay.shapes import AMPLE_BYTES, Shape, layout_of, read_shape, replay_of
from kvell.memory import Eviction
from kvell.simulator.replay.replay import Replay
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("rule_cost")
RULES: tuple[Eviction, ...] = ("lru", "hazard")
SLICE_STEPS = 25
SHAPES = ("llama3-8b", "gemma3-27b", "qwen3-next")


def measured(
    shape: Shape, trace: str, rows: Sequence[TraceRow], rounds: int
) -> dict[Eviction, list[float]]:
    """Microseconds of the manager for a request and step, by rule and round."""
    layout = layout_of(shape, full_pool_bytes(run(shape, trace, rows, AMPLE_BYTES)))
    found: dict[Eviction, list[float]] = {rule: [] for rule in RULES}
    for number in range(rounds):
        order = RULES if number % 2 else RULES[::-1]
        runs = {rule: replay_of(shape, layout, rows, eviction=rule) for rule in order}
        side_by_side(list(runs.values()))
        for rule, done in runs.items():
            found[rule].append(done.report()["manager_us_per_request_step"])
    return found


def side_by_side(runs: Sequence[Replay]) -> None:
    """Run some steps of each in turn, until all are done."""
    left = list(runs)
    while left:
        left = [one for one in left if all(one.go_on() for _ in range(SLICE_STEPS))]


def share(found: Mapping[Eviction, list[float]]) -> dict[str, float]:
    """The rule's cost as a part of the manager's time with it: best and middle rounds.

    Rules of one round ran side by side: their shares are compared, not their times.
    """
    shares = [1 - plain / learned for plain, learned in zip(*found.values(), strict=True)]
    return {"best": min(shares), "median": statistics.median(shares), "worst": max(shares)}


def main() -> None:
    """Print and write every shape and trace."""
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
            middle = ", ".join(f"{rule} {statistics.median(found[rule]):.2f}" for rule in RULES)
            print(
                f"{name}, {trace}: {middle} µs per request and step; "
                f"the rule {100 * parts['median']:.1f} % in the middle round "
                f"({100 * parts['best']:.1f} to {100 * parts['worst']:.1f} %)",
                flush=True,
            )
    result_file.write(options.json, told)


if __name__ == "__main__":
    main()
