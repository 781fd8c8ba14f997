"""Prefill and decode on one kind of instance or on two, with and without caching, in virtual time.

Colocated instances compute prompts in chunks beside decodes, as Kvell does, or whole and before all
decodes, as the paper's vLLM 0.4 does.

The setting of MemServe's figure 8: Llama 2 13B on two H800 an instance, as many instances and as
many requests per second in each column of a comparison::

    python -m bench.pd.virtual --rates 2 4 6 8 10
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import result_file
from kvell.cli.replay.command import replay_limits
from kvell.cli.replay.report import latencies, outcomes
from kvell.cost.amounts import shape_of
from kvell.cost.analytic import AnalyticModel
from kvell.cost.prices import prices_of
from kvell.engine.planning.whole_prompts import without_chunks
from kvell.load.arrivals import retime
from kvell.load.report import Objectives
from kvell.memory import plan_layout
from kvell.mempool.rendezvous import PdCaching
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.instance import Links
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_link, load_profile
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace
from kvell.vocabulary import GIB

HERE = Path(__file__).parent
ELEMENT_BYTES = 2
POOL_BYTES = 100 * GIB
"""Nine tenths of two devices of 80 GB, without the weights and room for activations."""
CONTEXT_TOKENS = 4_096
WORKLOADS = ("sharegpt-like", "loogle-like", "react-like")
REAL = "azure-2023-conv"
"""A trace of ``--traces`` whose prompts fit the model's context."""
WHOLE = ", whole prompts"
"""How names of colocated instances without chunked prefill end."""
SHAPES: Mapping[str, Mapping[str, int]] = {
    "2 colocated": {"mixed": 2},
    f"2 colocated{WHOLE}": {"mixed": 2},
    "1P1D": {"prefill": 1, "decode": 1},
    "3 colocated": {"mixed": 3},
    f"3 colocated{WHOLE}": {"mixed": 3},
    "1P2D": {"prefill": 1, "decode": 2},
    "2P1D": {"prefill": 2, "decode": 1},
}
COLOCATED: Mapping[str, str] = {"1P1D": "2 colocated", "1P2D": "3 colocated", "2P1D": "3 colocated"}
CACHINGS: Mapping[str, PdCaching] = {"": 0, " + caching": 3}
FIGURES = {"jct": "e2e_seconds", "ttft": "ttft_seconds", "tpot": "tpot_seconds"}
PAPER = {
    "sharegpt-like": {"pd_over_colocated": (-0.30, -0.42), "caching_over_pd": (-0.17, -0.29)},
    "loogle-like": {"pd_over_colocated": (-0.103, -0.108), "caching_over_pd": (-0.269, -0.225)},
    "react-like": {"pd_over_colocated": (-0.408, -0.531), "caching_over_pd": (-0.267, -0.214)},
}
"""Changes of the average and the P99 of the JCT, MemServe §8.3 (1P2D over colocated, and with
caching over that); the colocated instances of the paper are vLLM 0.4's, which compute whole
prompts and let decodes wait."""
COMPARISONS = (
    "pd_over_whole",
    "caching_over_pd",
    "pd_caching_over_whole_caching",
    "pd_over_colocated",
    "pd_caching_over_colocated_caching",
)
"""The first two are the paper's; the last two are over instances that compute chunks."""


@dataclass(frozen=True)
class Case:
    """One run.

    :param rate: requests per second and instance.
    :param batched_tokens: of a step at most; without chunks, a request's tokens at least.
    """

    workload: str
    shape: str
    caching: str
    rate: float
    requests: int
    hardware: str
    link: str
    batched_tokens: int
    seed: int = 0
    traces: Path | None = None

    @property
    def name(self) -> str:
        """What the columns call it."""
        return f"{self.shape}{self.caching}"


def rows_of(case: Case) -> list[TraceRow]:
    """The requests of a case, as a Poisson process."""
    count = case.requests
    if case.traces is not None and case.workload == REAL:
        rows = read_trace(case.traces / f"{REAL}.jsonl.gz", 2 * count)
        rows = [one for one in rows if one.num_tokens <= CONTEXT_TOKENS][:count]
    else:
        rows = generate_trace(case.workload, count, case.seed)
    return retime(rows, rate=case.rate * sum(SHAPES[case.shape].values()), seed=case.seed)


def run(case: Case) -> dict[str, Any]:
    """The figures of one run."""
    config = read_config(HERE / "llama2-13b.json")
    description = describe(config, ELEMENT_BYTES)
    layout = plan_layout(description.layers, POOL_BYTES)
    limits = replay_limits(layout, min(description.max_model_len, CONTEXT_TOKENS))
    if case.shape.endswith(WHOLE):
        most = max(case.batched_tokens, limits.max_model_len)
        limits = without_chunks(replace(limits, max_num_batched_tokens=most), layout)
    else:
        limits = replace(limits, max_num_batched_tokens=case.batched_tokens)
    machine = Machine(load_profile(case.hardware), model_cost(config, description, ELEMENT_BYTES))
    link = load_link(case.link)
    costs = prices_of(
        AnalyticModel(machine.profile, machine.cost),
        shape_of(description.layers),
        fetch_bytes_per_second=link.bytes_per_second,
        swap_bytes_per_second=link.bytes_per_second,
        chunk_tokens=case.batched_tokens,
    )
    spec = ClusterSpec(
        SHAPES[case.shape],
        layout,
        limits,
        machine,
        Links(Link(link.latency_seconds, link.bytes_per_second)),
        routing="session",
        pd_caching=CACHINGS[case.caching],
        costs=costs,
        hosts=None,
    )
    rows = rows_of(case)
    cluster = VirtualCluster(spec, rows)
    cluster.run()
    figures = cluster_figures(cluster)
    seen = latencies(
        outcomes(cluster.front.requests, rows), Objectives(), figures["requests_refused"]
    )
    kept = ("requests_finished", "requests_refused", "requests_moved", "moved_bytes", "roles")
    return {
        "workload": case.workload,
        "name": case.name,
        "rate": case.rate,
        **{short: seen[name] for short, name in FIGURES.items()},
        **{name: figures[name] for name in kept},
        "virtual_seconds": figures["virtual_seconds"],
    }


def changes(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What prefill and decode instances change over colocated ones, and caching over that."""
    by_name = {(one["workload"], one["rate"], one["name"]): one for one in found}
    told = []
    for workload, rate in sorted({(one["workload"], one["rate"]) for one in found}):
        for shape, colocated in COLOCATED.items():
            at = partial(_at, by_name, workload, rate)
            cached, whole = f"{shape} + caching", f"{colocated}{WHOLE}"
            pairs = {
                "pd_over_whole": (shape, whole),
                "caching_over_pd": (cached, shape),
                "pd_caching_over_whole_caching": (cached, f"{whole} + caching"),
                "pd_over_colocated": (shape, colocated),
                "pd_caching_over_colocated_caching": (cached, f"{colocated} + caching"),
            }
            told.append(
                {
                    "workload": workload,
                    "rate": rate,
                    "shape": shape,
                    **{name: _change(at(pairs[name][0]), at(pairs[name][1])) for name in pairs},
                }
            )
    return told


def _at(
    found: Mapping[Any, Mapping[str, Any]], workload: str, rate: float, name: str
) -> Mapping[str, Any]:
    return found[workload, rate, name]


def _change(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of each figure's mean and P99; below 0 is less time."""
    return {
        figure: {part: new[figure][part] / old[figure][part] - 1 for part in ("mean", "p99")}
        for figure in FIGURES
    }


def show(found: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]) -> None:
    """Print both as tables."""
    parts = [(figure, part) for figure in FIGURES for part in ("mean", "p99")]
    seconds = Table("workload", "rate", "instances", *(f"{f} {p}" for f, p in parts), title="ms")
    for one in found:
        values = (f"{one[figure][part] * 1000:,.1f}" for figure, part in parts)
        seconds.add_row(one["workload"], f"{one['rate']:g}", one["name"], *values)
    compared = Table("workload", "rate", "instances", "change", *(f"{f} {p}" for f, p in parts))
    for one in told:
        for name in COMPARISONS:
            values = (f"{one[name][figure][part]:+.1%}" for figure, part in parts)
            compared.add_row(
                *(one["workload"], f"{one['rate']:g}", one["shape"], name.replace("_", " ")),
                *values,
            )
    for table in (seconds, compared):
        Console(width=160).print(table)


def main(given: Sequence[str] | None = None) -> None:
    """Print tables, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help=f"a folder with {REAL}.jsonl.gz, replayed too")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--rates", nargs="+", type=float, default=[2.0, 4.0, 8.0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--hardware", default=str(HERE / "h800-x2.toml"))
    parser.add_argument("--link", default="nvlink-h800")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2_048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    workloads = [*args.workloads, *([REAL] if args.traces is not None else [])]
    cases = [
        Case(
            *(workload, shape, caching, rate, args.requests, args.hardware, args.link),
            *(args.max_num_batched_tokens, args.seed, args.traces),
        )
        for workload in workloads
        for rate in args.rates
        for shape in SHAPES
        for caching in CACHINGS
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(run, cases))
    told = changes(found)
    show(found, told)
    if args.json is not None:
        hardware = Path(args.hardware).stem
        asked = {"requests": args.requests, "hardware": hardware, "link": args.link}
        figures = {"asked": asked, "paper": PAPER, "changes": told, "runs": found}
        result_file.write(args.json, json.loads(json.dumps(figures)), processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
