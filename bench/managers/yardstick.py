"""Eviction alone: least recently used, the learned rule, the rule with hints, and the future.

Run from the repository's root: ``python -m bench.managers.yardstick --traces DIR``.  Requests
come one after another; the cache holds a part of the trace's distinct chunks.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.managers.chunk_cache import (
    Belady,
    ByHazard,
    Ordered,
    Prompt,
    distinct_chunks,
    hit_rate,
    prompt_of,
)
from kvell.simulator.traces.hints import is_wrong
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("eviction", result_file.VIRTUAL)
TRACES = ("mooncake-conversation", "mooncake-synthetic", "coding-assistant")
PERCENTS = (5, 10)
WRONG_HINTS = 0.1


@dataclass(frozen=True)
class Outcome:
    """Token hit rates in one cache.

    :param percent: of the trace's distinct chunks that the cache holds.
    :param belady: of the optimal policy, which evicts what is used again the latest.
    """

    trace: str
    percent: int
    capacity_chunks: int
    least_recently_used: float
    belady: float
    rule: float
    rule_with_hints: float

    def gap_closed(self, rate: float) -> float:
        """How far a rate is from least recently used (0) to the best possible (1)."""
        gap = self.belady - self.least_recently_used
        return (rate - self.least_recently_used) / gap if gap else 0.0


def hints(prompts: Sequence[Prompt]) -> list[bool]:
    """Hints whether a later request uses the last full chunk; one in ten, by index, is wrong."""
    later: set[int] = set()
    told: list[bool] = []
    for index in range(len(prompts) - 1, -1, -1):
        prompt = prompts[index]
        full = prompt.prompt_tokens // prompt.chunk_tokens
        returns = 0 < full <= len(prompt.chain) and prompt.chain[full - 1] in later
        told.append(returns != is_wrong(index, WRONG_HINTS))
        later.update(prompt.chain)
    return told[::-1]


def measured(trace: str, prompts: Sequence[Prompt], percent: int) -> Outcome:
    """Run all four policies in a cache of one size."""
    capacity = -(-distinct_chunks(prompts) * percent // 100)
    return Outcome(
        trace,
        percent,
        capacity,
        hit_rate(prompts, capacity, Ordered()),
        hit_rate(prompts, capacity, Belady(prompts)),
        hit_rate(prompts, capacity, ByHazard(capacity)),
        hit_rate(prompts, capacity, ByHazard(capacity, hints(prompts))),
    )


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Hit rates, and the part of the gap that is closed."""
    table = Table(title="Eviction alone: token hit rate (part of the gap closed, %)")
    for column in ("trace", "cache", "LRU", "rule", "rule + hints", "Belady"):
        table.add_column(column)
    for one in outcomes:
        cells = [
            f"{rate:.4f} ({100 * one.gap_closed(rate):.1f})"
            for rate in (one.rule, one.rule_with_hints)
        ]
        edges = f"{one.least_recently_used:.4f}", f"{one.belady:.4f}"
        table.add_row(one.trace, f"{one.percent} %", edges[0], *cells, edges[1])
    return table


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--trace", action="append", default=[], help="only this trace")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the JSON goes")
    args = parser.parse_args()
    outcomes = []
    for trace in args.trace or TRACES:
        prompts = [prompt_of(row) for row in read_trace(args.traces / f"{trace}.jsonl.gz")]
        outcomes += [measured(trace, prompts, percent) for percent in PERCENTS]
    Console(width=140).print(table_of(outcomes))
    written = [
        asdict(one)
        | {
            "rule_gap_closed": one.gap_closed(one.rule),
            "rule_with_hints_gap_closed": one.gap_closed(one.rule_with_hints),
        }
        for one in outcomes
    ]
    result_file.write(args.json, written, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
