"""Throughput of a cluster that lends, and of one that does not, in virtual time.

Run from the repository's root: ``python -m bench.lending.traces``.  See README.md beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random

from bench import result_file
from kvell.cli.replay.command import replay_limits
from kvell.cluster.steering.placements import longest_with
from kvell.cost.amounts import shape_of
from kvell.cost.analytic import AnalyticModel
from kvell.cost.prices import prices_of
from kvell.engine.lending.distributed_request import section_bytes
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.requests.limits import Limits
from kvell.memory import Layout, plan_layout
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.instance import IN_ONE_MEMORY, Links, NeighbourReads
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_link, load_profile
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB, SECTION_TOKENS

CONFIG = Path(__file__).with_name("llama2-7b.json")
ELEMENT_BYTES = 2
HOSTS, OF_A_HOST = 4, 8
MOST_TOKENS = 4_000_000
"""Of a request, however much memory there is."""
LONG_TOKENS = (40_000, 60_000)
SHORT_TOKENS = 200
"""Of the usual request, in the mean; prompt and answer have half of it each."""
LONG_ANSWER_TOKENS = 400
TRACES = {"0": 0.0207, "1": 0.0103, "2": 0.0054}
"""Parts of the requests that are long: with them means and deviations are nearly those of the
paper's table 1."""
WAYS = ("alone", "in place", "one memory", "creditor computes")
"""Nobody lends; a debtor reads over NVLink; as in its own memory; a creditor is asked for attention
(the paper's equation 6 with a round trip)."""
ROUND_TRIP_SECONDS = 2e-5
"""To a GPU of the same host and back, an assumption."""


@dataclass(frozen=True)
class Outcome:
    """A run.

    :param rate: requests that come in a second.
    :param tokens_per_second: of answers that ended while requests came, the first quarter of that
        time left out.
    :param offered: the same, if every request were answered as soon as it comes.
    :param whole_seconds: until the last answer has ended.
    :param half_wait_seconds: of short requests until their first token, the median, and
        ``most_wait_seconds`` of one in a hundred.
    """

    trace: str
    pool_gib: int
    way: str
    seed: int
    rate: float
    tokens_per_second: float
    offered: float
    whole_seconds: float
    half_wait_seconds: float
    most_wait_seconds: float
    preemptions: int
    lent: int
    lost: int
    recalled: int
    refused: int


def rows_of(trace: str, requests: int, rate: float, seed: int) -> list[TraceRow]:
    """Short requests and a few long ones, as a Poisson process; like the paper's traces 0 to 2."""
    chance = Random(seed)
    rows, at_seconds = [], 0.0
    for _ in range(requests):
        at_seconds += chance.expovariate(rate)
        if chance.random() < TRACES[trace]:
            prompt, answer = chance.randint(*LONG_TOKENS) - LONG_ANSWER_TOKENS, LONG_ANSWER_TOKENS
        else:
            sizes = (chance.expovariate(2 / SHORT_TOKENS) for _ in range(2))
            prompt, answer = (max(1, min(2_000, round(size))) for size in sizes)
        rows.append(TraceRow(at_seconds, prompt, answer))
    return rows


def spec_of(way: str, pool_bytes: int) -> ClusterSpec:
    """4 hosts of 8 A100 with LLaMA2-7B on each; requests go where most memory is free."""
    config = read_config(CONFIG)
    description = describe(config, ELEMENT_BYTES)
    layers = description.layers
    layout = plan_layout(layers, pool_bytes)
    machine = Machine(load_profile("a100-80"), model_cost(config, description, ELEMENT_BYTES))
    link = load_link("nvlink-a100")
    rate = link.bytes_per_second
    costs = prices_of(
        AnalyticModel(machine.profile, machine.cost),
        shape_of(layers),
        fetch_bytes_per_second=rate,
        swap_bytes_per_second=rate,
        away_bytes_per_second=rate if way == "in place" else None,
        round_trip_seconds=ROUND_TRIP_SECONDS,
    )
    held, away = costs.held_token_seconds, costs.away_token_seconds
    reads = NeighbourReads((away - held) * SECTION_TOKENS, held * SECTION_TOKENS)
    asks = way == "creditor computes"
    names = [f"mixed-{i}" for i in range(HOSTS * OF_A_HOST)]
    hosts = {name: name if asks else f"host-{i // OF_A_HOST}" for i, name in enumerate(names)}
    limits = limits_of(layout, lends=way != "alone")
    return ClusterSpec(
        {"mixed": HOSTS * OF_A_HOST},
        layout,
        limits,
        machine,
        Links(Link(link.latency_seconds, rate)),
        routing="most-free-memory",
        costs=costs,
        hosts=None if way == "alone" else hosts,
        reads=IN_ONE_MEMORY if asks else reads,
        asks=asks,
    )


def limits_of(layout: Layout, lends: bool) -> Limits:
    """What one instance can serve, and with others of its host."""
    limits: Limits = replay_limits(layout, MOST_TOKENS)
    if not lends:
        return limits
    facts = InstanceFacts(
        *(0, 0, "", limits.max_model_len, layout.pool_bytes),
        section_bytes=section_bytes(layout.groups),
        reach_tokens=MOST_TOKENS,
    )
    most = longest_with(facts, facts.lengths(), [layout.pool_bytes] * (OF_A_HOST - 1))
    return replace(limits, reach_tokens=most)


def outcome(trace: str, pool_gib: int, way: str, seed: int, requests: int, rate: float) -> Outcome:
    """One run."""
    rows = rows_of(trace, requests, rate, seed)
    cluster = VirtualCluster(spec_of(way, pool_gib * GIB), rows)
    cluster.run()
    figures = cluster_figures(cluster)
    begin, end = (cluster.front.requests[at].came_seconds or 0.0 for at in (requests // 4, -1))
    ended = sum(
        row.output_tokens
        for one, row in zip(cluster.front.requests, rows, strict=True)
        if one.finish_seconds is not None and begin <= one.finish_seconds < end
    )
    offered = sum(row.output_tokens for row in rows[requests // 4 : -1])
    waits = sorted(
        one.first_token_seconds - one.came_seconds
        for one, row in zip(cluster.front.requests, rows, strict=True)
        if row.num_tokens < LONG_TOKENS[0]
        and one.first_token_seconds is not None
        and one.came_seconds is not None
    )
    sections = figures["sections"]
    return Outcome(
        *(trace, pool_gib, way, seed, rate, ended / (end - begin), offered / (end - begin)),
        figures["virtual_seconds"],
        *(waits[len(waits) // 2], waits[len(waits) * 99 // 100]),
        figures["roles"]["mixed"]["preemptions"],
        *(sections["lent"], sections["lost"], sections["recalled"]),
        figures["requests_refused"],
    )


def show(one: Outcome) -> str:
    """One line of the table."""
    return (
        f"{one.trace:>5} {one.pool_gib:>4} {one.way:<17} {one.seed:>4} {one.rate:>5.0f} "
        f"{one.offered:>8.0f} {one.tokens_per_second:>8.0f} {one.whole_seconds:>6.0f} "
        f"{one.half_wait_seconds:>7.2f} "
        f"{one.most_wait_seconds:>7.2f} {one.preemptions:>7} {one.lent:>6} {one.lost:>5} "
        f"{one.recalled:>8} {one.refused:>7}"
    )


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Run, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", nargs="+", default=[*TRACES], choices=[*TRACES])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--pool-gib", type=int, nargs="+", default=[32])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rates", type=float, nargs="+", default=[60, 120], help="per second")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    for pool_gib in asked.pool_gib:
        for way in ("alone", "in place"):
            limits = spec_of(way, pool_gib * GIB).limits
            longest = max(limits.max_model_len, limits.reach_tokens)
            print(f"longest context, {pool_gib} GiB, {way}: {longest:,} tokens")
    print(
        "trace  GiB way               seed  rate  offered tokens/s  whole  wait50  wait99 preempt"
        "   lent  lost recalled refused"
    )
    found: list[Outcome] = []
    for trace in asked.traces:
        for pool_gib in asked.pool_gib:
            for rate, seed in product(asked.rates, asked.seeds):
                for way in asked.ways:
                    one = outcome(trace, pool_gib, way, seed, asked.requests, rate)
                    found.append(one)
                    print(show(one), flush=True)
    if asked.json is not None:
        result_file.write(asked.json, [asdict(one) for one in found], processor=result_file.VIRTUAL)
    return found


if __name__ == "__main__":
    main()
