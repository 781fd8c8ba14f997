"""A load that swings between prompts and answers: fixed splits beside roles that follow it.

::

    python -m bench.routing.swings --instances 4 --seeds 0 1 2

In one half of each swing ten times as many tokens of prompts come as in the other, and in the other
ten times as many tokens of answers.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.routing.setting import cluster_spec
from kvell.cli.replay.report import latencies, outcomes
from kvell.cluster.steering.steering import RoleRules
from kvell.load.report import Objectives
from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.traces.rows import TraceRow

OBJECTIVES = Objectives(ttft_seconds=1.0, tpot_seconds=0.02)
PROMPTS, ANSWERS = (4_000, 40), (400, 400)
"""Tokens of prompt and answer of a request, in the two halves of a swing."""
LATENCIES = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99")
AVERAGED = ("slo_attainment", *LATENCIES, "changes_per_swing")


@dataclass(frozen=True)
class Case:
    """One run.

    :param prefill: instances that compute prompts at the start.
    :param prompt_rate: requests per second in the half of long prompts, and ``answer_rate`` in the
        half of long answers, which has a tenth of the other's tokens of prompts at equal rates.
    :param half_seconds: of half a swing.
    """

    prefill: int
    instances: int
    follows: bool
    prompt_rate: float
    answer_rate: float
    half_seconds: float
    swings: int
    seed: int = 0

    @property
    def name(self) -> str:
        """How the table calls it."""
        split = f"{self.prefill}P{self.instances - self.prefill}D"
        return f"{split}, roles follow" if self.follows else split


@dataclass(frozen=True)
class Half:
    """Half a swing.

    :param rate: requests per second.
    :param prompt_tokens: of a request on average, and ``answer_tokens``; each from half to one and
        a half of it.
    """

    rate: float
    prompt_tokens: int
    answer_tokens: int


def swinging(halves: Sequence[Half], half_seconds: float, seed: int) -> list[TraceRow]:
    """Requests of one half after another, each as a Poisson process; no prefix is shared."""
    draw, rows, start = np.random.default_rng(seed), list[TraceRow](), 0.0
    for half in halves:
        at = start
        while (at := at + draw.exponential(1 / half.rate)) < start + half_seconds:
            spread = draw.uniform(0.5, 1.5, 2)
            lengths = int(half.prompt_tokens * spread[0]), int(half.answer_tokens * spread[1])
            rows.append(TraceRow(at, max(1, lengths[0]), max(2, lengths[1])))
        start += half_seconds
    return rows


def rows_of(case: Case) -> list[TraceRow]:
    """Requests whose rate and lengths swing."""
    halves = (Half(case.prompt_rate, *PROMPTS), Half(case.answer_rate, *ANSWERS))
    return swinging(halves * case.swings, case.half_seconds, case.seed)


def run(case: Case) -> dict[str, Any]:
    """The figures of one run."""
    counts = {"prefill": case.prefill, "decode": case.instances - case.prefill}
    rules = RoleRules() if case.follows else None
    cluster = VirtualCluster(cluster_spec(counts, role_rules=rules, seed=case.seed), rows_of(case))
    cluster.run()
    rows, figures = rows_of(case), cluster_figures(cluster)
    seen = latencies(
        outcomes(cluster.front.requests, rows), OBJECTIVES, figures["requests_refused"]
    )
    return {
        "name": case.name,
        "case": asdict(case),
        "requests": len(rows),
        "slo_attainment": seen["slo_attainment"],
        "ttft_mean": seen["ttft_seconds"]["mean"],
        "ttft_p99": seen["ttft_seconds"]["p99"],
        "tpot_mean": seen["tpot_seconds"]["mean"],
        "tpot_p99": seen["tpot_seconds"]["p99"],
        "role_changes": cluster.front.queue.role_changes,
        "changes_per_swing": cluster.front.queue.role_changes / case.swings,
    }


def means(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each kind of roles, as means over its seeds."""
    names = dict.fromkeys(one["name"] for one in found)
    return [
        {"name": name, **_mean([one for one in found if one["name"] == name])} for name in names
    ]


def _mean(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in runs) for name in AVERAGED}


def main(given: Sequence[str] | None = None) -> None:
    """Print a table, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=6)
    parser.add_argument("--prompt-rate", type=float, default=24.0)
    parser.add_argument("--answer-rate", type=float, default=60.0)
    parser.add_argument("--half-seconds", type=float, default=60.0)
    parser.add_argument("--swings", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    asked = (args.prompt_rate, args.answer_rate, args.half_seconds, args.swings)
    half = args.instances // 2
    splits = [(one, False) for one in range(1, args.instances)] + [(half, True)]
    cases = [
        Case(prefill, args.instances, follows, *asked, seed)
        for prefill, follows in splits
        for seed in args.seeds
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(run, cases))
    table = Table("roles", "in time", *(f"{one} ms" for one in LATENCIES), "changes per swing")
    for one in means(found):
        values = (f"{1000 * one[name]:,.1f}" for name in LATENCIES)
        table.add_row(
            one["name"], f"{one['slo_attainment']:.1%}", *values, f"{one['changes_per_swing']:.1f}"
        )
    Console(width=130).print(table)
    if args.json:
        told = {"objectives": asdict(OBJECTIVES), "runs": found}
        result_file.write(args.json, json.loads(json.dumps(told)), processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
