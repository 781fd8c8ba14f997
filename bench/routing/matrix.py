"""Routing policies over workloads and numbers of instances, in virtual time with the engine's code.

::

    python -m bench.routing.matrix --json bench/results/virtual/routing.json
    python -m bench.routing.matrix --only shares --json bench/results/virtual/routing_shares.json

See README.md beside this file.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.routing.setting import ATTENTION, HYBRID, MOST_MODEL_TOKENS, cluster_spec
from kvell.cli.replay.latency import latencies, outcomes
from kvell.cluster.prefix_directory import PrefixDirectory
from kvell.cluster.routing.policies import ROUTINGS
from kvell.engine.protocol.notices import IndexedGroup
from kvell.load.arrivals import retimed
from kvell.load.report import Objectives
from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace

GENERATED = ("loogle-like", "sharegpt-like", "react-like")
REAL = ("mooncake-conversation", "coding-assistant")
"""Traces of ``--traces``."""
TEXTS, TEXT_TOKENS, BLOCK_TOKENS, EDIT_OUTPUT_TOKENS = 6, 8_192, 16, 32
FORKS_OF_A_TEXT = 6
OVERLAP = "token overlap"
"""prompt-tree over overlaps of tokens."""
RATES = {
    "loogle-like": 50.0,
    "sharegpt-like": 40.0,
    "react-like": 20.0,
    "edits": 2.5,
    "forks": 2.5,
    "mooncake-conversation": 2.0,
    "coding-assistant": 1.0,
}
"""Requests per second and instance: most keep the instances nearly busy."""


@dataclass(frozen=True)
class Case:
    """One run.

    :param share: how often each session comes, each time as another user's.
    :param rate: requests per second and instance that computes prompts.
    :param requests: per instance that computes prompts.
    """

    workload: str
    policy: str
    counts: tuple[tuple[str, int], ...]
    rate: float
    requests: int
    share: int = 1
    model: str = ATTENTION
    notice_seconds: float = 0.0
    notice_loss: float = 0.0
    seed: int = 0
    traces: Path | None = None

    @property
    def computing(self) -> int:
        """Instances that compute prompts."""
        return sum(count for role, count in self.counts if role != "decode")

    @property
    def setting(self) -> str:
        """Everything but the policy, in words."""
        shape = "+".join(f"{count} {role}" for role, count in self.counts)
        late = f", notices {self.notice_seconds:g} s late" if self.notice_seconds else ""
        share = f" x{self.share}" if self.share > 1 else ""
        model = "" if self.model == ATTENTION else f", {self.model}"
        return f"{self.workload}{share}, {shape}, {self.rate:g}/s{model}{late}"


class ByOverlap(PrefixDirectory):
    """What routers see that know tokens and no layer groups: a state is where its tokens are."""

    def joined(self, instance_id: str, role: str, indexed: Sequence[IndexedGroup]) -> None:
        """See :class:`PrefixDirectory`."""
        told = [
            structs.replace(one, block_tokens=0) if one.kind == "state" else one for one in indexed
        ]
        super().joined(instance_id, role, told)


def rows_of(case: Case) -> list[TraceRow]:
    """The requests of a case, as a Poisson process."""
    count = case.requests * case.computing
    if case.workload in REAL:
        assert case.traces is not None, "it is a trace of --traces"
        rows = read_trace(case.traces / f"{case.workload}.jsonl.gz", 4 * count)
        rows = [one for one in rows if one.num_tokens <= MOST_MODEL_TOKENS][:count]
    elif case.workload == "edits":
        rows = edits(count, case.seed)
    elif case.workload == "forks":
        rows = forks(count, case.seed)
    else:
        rows = shared(generate_trace(case.workload, count // case.share, case.seed), case.share)
    return retimed(rows, rate=case.rate * case.computing, seed=case.seed)


def edits(count: int, seed: int) -> list[TraceRow]:
    """Texts that are sent again and again, each time changed from some place on.

    A prompt begins like its text up to a random place.  So it overlaps with all earlier ones, and a
    state is seldom where they part.
    """
    draw, blocks = np.random.default_rng(seed), TEXT_TOKENS // BLOCK_TOKENS
    chances = 1 / np.arange(1, TEXTS + 1)
    which = draw.choice(TEXTS, count, p=chances / chances.sum())
    kept = draw.integers(blocks // 4, blocks, count)
    return [
        TraceRow(0.0, TEXT_TOKENS, EDIT_OUTPUT_TOKENS, text * blocks + np.arange(cut), BLOCK_TOKENS)
        for text, cut in zip(which.tolist(), kept.tolist(), strict=True)
    ]


def forks(count: int, seed: int) -> list[TraceRow]:
    """Texts that go on in several ways, as agents do that try a task again from earlier places.

    The ways of a text follow one another.  Each keeps the text up to a random place, where nobody
    has a state, and is another from there on.
    """
    draw, blocks = np.random.default_rng(seed), TEXT_TOKENS // BLOCK_TOKENS
    kept = draw.integers(blocks // 4, blocks, count).tolist()
    return [
        TraceRow(0.0, TEXT_TOKENS, EDIT_OUTPUT_TOKENS, text * blocks + np.arange(cut), BLOCK_TOKENS)
        for text, cut in ((i // FORKS_OF_A_TEXT, cut) for i, cut in enumerate(kept))
    ]


def shared(rows: Sequence[TraceRow], share: int) -> list[TraceRow]:
    """Every session so often, each time under another name: MemServe's share ratio."""
    return [
        replace(row, session=None if row.session is None else f"{row.session}/{number}")
        for row in rows
        for number in range(share)
    ]


def run(case: Case) -> dict[str, Any]:
    """The figures of one run."""
    by_overlap = case.policy == OVERLAP
    spec = cluster_spec(
        dict(case.counts),
        case.model,
        routing="prompt-tree" if by_overlap else case.policy,
        notice_seconds=case.notice_seconds,
        notice_loss=case.notice_loss,
        seed=case.seed,
    )
    rows = rows_of(case)
    cluster = VirtualCluster(spec, rows, locality=ByOverlap() if by_overlap else None)
    cluster.run()
    figures = cluster_figures(cluster)
    served = outcomes(cluster.front.requests, rows)
    seen = latencies(served, Objectives(), figures["requests_refused"])
    roles = [one for role, one in figures["roles"].items() if role != "decode"]
    prompt_tokens = sum(one["prompt_tokens"] for one in roles)
    return {
        "setting": case.setting,
        "policy": case.policy,
        "ttft_mean": seen["ttft_seconds"]["mean"],
        "ttft_p99": seen["ttft_seconds"]["p99"],
        "jct_mean": seen["e2e_seconds"]["mean"],
        "busy": max(one["busy"] for one in roles),
        "hit_rate": sum(one["hit_tokens"] for one in roles) / max(1, prompt_tokens),
        "moved_bytes": figures["moved_bytes"],
        "finished": figures["requests_finished"],
        "refused": figures["requests_refused"],
    }


def grid(args: argparse.Namespace) -> Iterable[Case]:
    """The cases that are asked for."""

    def each(**fixed: Any) -> Iterable[Case]:
        for policy in args.policies:
            yield Case(policy=policy, seed=args.seed, traces=args.traces, **fixed)

    requests = args.requests
    if args.only in ("", "shares"):
        for share in (1, 2, 3, 4):
            split = (("prefill", 3), ("decode", 1))
            yield from each(
                workload="loogle-like", counts=split, rate=60.0, requests=requests, share=share
            )
    workloads = args.workloads or [*GENERATED, *(REAL if args.traces is not None else ())]
    if args.only in ("", "matrix"):
        for workload in workloads:
            for count in args.instances:
                rate, fewest = RATES[workload], 10 if workload in REAL else 20
                each_ = max(fewest, requests * 4 // count)
                mixed = (("mixed", count),)
                yield from each(workload=workload, counts=mixed, rate=rate, requests=each_)
    if args.only in ("", "hybrid"):
        for workload in ("edits", "forks", "react-like"):
            for policy in (*args.policies, OVERLAP):
                yield Case(
                    *(workload, policy, (("mixed", 4),), RATES[workload], requests),
                    model=HYBRID,
                    seed=args.seed,
                )
    if args.only in ("", "stale"):
        for late, loss in ((0.0, 0.0), (1.0, 0.01), (10.0, 0.01)):
            yield Case(
                "sharegpt-like",
                "prompt-tree",
                (("mixed", 4),),
                RATES["sharegpt-like"],
                requests,
                notice_seconds=late,
                notice_loss=loss,
                seed=args.seed,
            )


def show(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a table, the best of each setting first."""
    columns = ("ttft_mean", "ttft_p99", "jct_mean")
    table = Table("setting", "policy", *(f"{one} ms" for one in columns), "hit rate", "busy")
    for setting in dict.fromkeys(one["setting"] for one in found):
        some = [one for one in found if one["setting"] == setting]
        for one in sorted(some, key=lambda one: one["ttft_mean"]):
            values = [f"{1000 * one[name]:,.1f}" for name in columns]
            values += [f"{one['hit_rate']:.1%}", f"{one['busy']:.0%}"]
            table.add_row(setting, one["policy"], *values)
    Console(width=150).print(table)


def main(given: Sequence[str] | None = None) -> None:
    """Print tables, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help=f"a folder with {' and '.join(REAL)}")
    parser.add_argument("--policies", nargs="+", default=list(ROUTINGS))
    parser.add_argument("--only", choices=("shares", "matrix", "hybrid", "stale"), default="")
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--workloads", nargs="+", choices=GENERATED + REAL, help="of the matrix")
    parser.add_argument("--requests", type=int, default=200, help="per instance, of the smallest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(run, grid(args)))
    show(found)
    if args.json is not None:
        told = {"runs": found}
        result_file.write(args.json, json.loads(json.dumps(told)), processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
