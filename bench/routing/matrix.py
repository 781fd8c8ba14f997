"""Routing policies over workloads and numbers of instances: ``kvell replay --instances``.

``python -m bench.routing.matrix shares``.  See README.md beside this file.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.replay.command import replayed
from kvell.cluster.routing.policies import ROUTINGS
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import write_trace

HYBRID, ATTENTION = "nemotron-h-8b", "llama3-8b"
DEVICE = (
    *("--hardware", "h800", "--link", "nvlink-h800"),
    *("--kv-memory", "48GiB", "--max-num-batched-tokens", "2048"),
)
"""A device of 80 GB without the weights and room for activations, connected by NVLink."""
RATES = {"loogle-like": 50.0, "sharegpt-like": 40.0, "react-like": 20.0}
"""Requests per second and instance of generated workloads; most instances are nearly busy."""
MADE_RATE = 2.5
REAL = {"mooncake-conversation": 2.0, "coding-assistant": 1.0}
"""Rates of the traces of ``--traces``."""
TEXTS, TEXT_TOKENS, BLOCK_TOKENS, MADE_OUTPUT_TOKENS, FORKS_OF_A_TEXT = 6, 8_192, 16, 32, 6


@dataclass(frozen=True)
class Case:
    """One run.

    :param instances: as ``kvell replay --instances`` takes them.
    :param requests: in all.
    :param rate: requests per second in all.
    :param share: the number of users who send each session.
    """

    workload: str
    policy: str
    instances: str
    rate: float
    requests: int
    share: int = 1
    model: str = ATTENTION
    seed: int = 0
    traces: Path | None = None

    @property
    def setting(self) -> str:
        """Everything but the policy, for people."""
        share = f" ×{self.share}" if self.share > 1 else ""
        model = "" if self.model == ATTENTION else f", {self.model}"
        return f"{self.workload}{share}, {self.instances}, {self.rate:g}/s{model}"


def _starts(count: int, seed: int) -> list[int]:
    """Draw how many blocks of its text each prompt keeps."""
    blocks = TEXT_TOKENS // BLOCK_TOKENS
    draw = np.random.default_rng(seed)
    return [int(kept) for kept in draw.integers(blocks // 4, blocks, count)]


def _made(texts: Sequence[int], kept: Sequence[int]) -> list[TraceRow]:
    blocks = TEXT_TOKENS // BLOCK_TOKENS
    return [
        TraceRow(0.0, TEXT_TOKENS, MADE_OUTPUT_TOKENS, text * blocks + np.arange(cut), BLOCK_TOKENS)
        for text, cut in zip(texts, kept, strict=True)
    ]


def edits(count: int, seed: int) -> list[TraceRow]:
    """Return prompts that begin like one of a few texts, each up to a random place.

    A prompt overlaps with all earlier ones of its text, and a state is seldom where they part.
    """
    chances = 1 / np.arange(1, TEXTS + 1)
    texts = np.random.default_rng(seed + 1).choice(TEXTS, count, p=chances / chances.sum())
    return _made(texts.tolist(), _starts(count, seed))


def forks(count: int, seed: int) -> list[TraceRow]:
    """Return texts that continue in several ways from random places, one way after the other."""
    return _made([index // FORKS_OF_A_TEXT for index in range(count)], _starts(count, seed))


MADE: Mapping[str, Callable[[int, int], list[TraceRow]]] = {"edits": edits, "forks": forks}


def shared(rows: Sequence[TraceRow], share: int) -> list[TraceRow]:
    """Return every session ``share`` times under other names: MemServe's share ratio."""
    return [
        replace(row, session=None if row.session is None else f"{row.session}/{number}")
        for row in rows
        for number in range(share)
    ]


def trace_of(case: Case, directory: Path) -> str | Path:
    """Return the trace of a case as ``kvell replay --trace`` takes it; it may be written first."""
    if case.workload in REAL:
        if case.traces is None:
            raise ValueError(f"{case.workload} is a trace of --traces")
        return case.traces / f"{case.workload}.jsonl.gz"
    if case.workload in MADE:
        rows = MADE[case.workload](case.requests, case.seed)
    elif case.share > 1:
        rows = generate_trace(case.workload, case.requests // case.share, case.seed)
        rows = shared(rows, case.share)
    else:
        return case.workload
    path = directory / "trace.jsonl"
    write_trace(path, rows)
    return path


def run(case: Case) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as directory:
        report = replayed(
            *("--trace", trace_of(case, Path(directory)), "--limit", case.requests),
            *("--rate", case.rate, "--seed", case.seed, "--model", case.model),
            *("--instances", case.instances, "--routing", case.policy, *DEVICE),
        )
    roles = [one for role, one in report["roles"].items() if role != "decode"]
    prompt_tokens = sum(one["prompt_tokens"] for one in roles)
    return {
        "setting": case.setting,
        "policy": case.policy,
        "ttft_mean": report["ttft_seconds"]["mean"],
        "ttft_p99": report["ttft_seconds"]["p99"],
        "jct_mean": report["e2e_seconds"]["mean"],
        "busy": max(one["busy"] for one in roles),
        "hit_rate": sum(one["hit_tokens"] for one in roles) / max(1, prompt_tokens),
        "moved_bytes": report["moved_bytes"],
        "finished": report["requests_finished"],
        "refused": report["requests_refused"],
    }


def grid(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases of the command line."""
    if args.suite == "shares":
        for share, policy in product((1, 2, 3, 4), args.policies):
            count, rate = 3 * args.requests, 3 * 60.0
            yield Case("loogle-like", policy, "prefill=3,decode=1", rate, count, share, ATTENTION)
    if args.suite == "hybrid":
        for workload, policy in product((*MADE, "react-like"), args.policies):
            rate = 4 * RATES.get(workload, MADE_RATE)
            yield Case(workload, policy, "mixed=4", rate, 4 * args.requests, 1, HYBRID)
    if args.suite == "matrix":
        rates = RATES | (REAL if args.traces is not None else {})
        for workload in args.workloads or rates:
            for count, policy in product(args.instances, args.policies):
                each = max(10 if workload in REAL else 20, args.requests * 4 // count)
                rate = count * rates[workload]
                yield Case(workload, policy, f"mixed={count}", rate, count * each)


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table, the best policy of each setting first."""
    columns = ("ttft_mean", "ttft_p99", "jct_mean")
    table = Table("setting", "policy", *(f"{name} ms" for name in columns), "hit rate", "busy")
    for run in sorted(runs, key=lambda run: (run["setting"], run["ttft_mean"])):
        values = [f"{1000 * run[name]:,.1f}" for name in columns]
        shares = (f"{run['hit_rate']:.1%}", f"{run['busy']:.0%}")
        table.add_row(run["setting"], run["policy"], *values, *shares)
    Console(width=150).print(table)


def main(given: Sequence[str] | None = None) -> None:
    """Print a table, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("shares", "matrix", "hybrid"))
    parser.add_argument("--traces", type=Path, help=f"a folder with {' and '.join(REAL)}")
    parser.add_argument("--policies", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--workloads", nargs="+", choices=(*RATES, *REAL), help="of the matrix")
    parser.add_argument("--requests", type=int, default=200, help="per instance, of the smallest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    cases = [replace(case, seed=args.seed, traces=args.traces) for case in grid(args)]
    with ProcessPoolExecutor(args.processes) as pool:
        runs = list(pool.map(run, cases))
    show(runs)
    if args.json is not None:
        result_file.write(args.json, {"runs": runs}, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
