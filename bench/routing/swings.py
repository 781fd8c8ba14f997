"""A load that swings between prompts and answers: fixed splits beside roles that follow it.

::

    python -m bench.routing.swings --json bench/results/virtual/roles.json

In one half of each swing ten times as many tokens of prompts come as in the other, and in the other
ten times as many tokens of answers.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.routing.setting import cluster_spec
from kvell.cli.replay.latency import latencies, outcomes
from kvell.cluster.roles import RoleRules
from kvell.load.report import Objectives
from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.traces.rows import TraceRow

OBJECTIVES = Objectives(ttft_seconds=1.0, tpot_seconds=0.02)
PROMPTS, ANSWERS = (4_000, 40), (400, 400)
"""Tokens of prompt and answer of a request, in the two halves of a swing."""


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


def rows_of(case: Case) -> list[TraceRow]:
    """Requests as a Poisson process whose rate and lengths swing; no prefix is shared."""
    draw, rows, start = np.random.default_rng(case.seed), list[TraceRow](), 0.0
    halves = ((case.prompt_rate, PROMPTS), (case.answer_rate, ANSWERS))
    for rate, (prompt, answer) in halves * case.swings:
        at = start
        while (at := at + draw.exponential(1 / rate)) < start + case.half_seconds:
            spread = draw.uniform(0.5, 1.5, 2)
            lengths = max(1, int(prompt * spread[0])), max(2, int(answer * spread[1]))
            rows.append(TraceRow(at, *lengths))
        start += case.half_seconds
    return rows


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


def main(given: Sequence[str] | None = None) -> None:
    """Print a table, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=6)
    parser.add_argument("--prompt-rate", type=float, default=24.0)
    parser.add_argument("--answer-rate", type=float, default=60.0)
    parser.add_argument("--half-seconds", type=float, default=60.0)
    parser.add_argument("--swings", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=str)
    args = parser.parse_args(given)
    asked = (args.prompt_rate, args.answer_rate, args.half_seconds, args.swings, args.seed)
    half = args.instances // 2
    cases = [Case(one, args.instances, False, *asked) for one in range(1, args.instances)]
    cases.append(Case(half, args.instances, True, *asked))
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(run, cases))
    columns = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99")
    table = Table("roles", "in time", *(f"{one} ms" for one in columns), "changes per swing")
    for one in found:
        values = (f"{1000 * one[name]:,.1f}" for name in columns)
        table.add_row(
            one["name"], f"{one['slo_attainment']:.1%}", *values, f"{one['changes_per_swing']:.1f}"
        )
    Console(width=130).print(table)
    if args.json:
        told = {"objectives": asdict(OBJECTIVES), "runs": found}
        result_file.write(args.json, json.loads(json.dumps(told)), processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
