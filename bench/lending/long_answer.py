"""A long answer that outgrows its instance, beside short requests (in virtual time).

Run from the repository's root: ``python -m bench.lending.long_answer``.  See README.md beside this
file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from bench import result_file
from bench.lending.traces import WAYS, limits_of, spec_of
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB

INSTANCES = 4
PROMPT_TOKENS = 1_000
"""Of the long request; its answer grows beyond an instance's memory."""
SHORT_TOKENS = 200
"""Mean prompt and mean answer of the others."""
LONG_STARTS_SECONDS = 5.0
STEP_SECONDS = 0.04
"""More than a step takes: short requests come until the long answer has ended."""


@dataclass(frozen=True)
class LongAnswer:
    """A run.

    :param long_tokens: of the long answer, which ends early where nobody lends.
    :param long_rate: its tokens a second.
    :param output_rate: output tokens a second of all, while it runs.
    :param tpot_ms: median and 99 in 100 of the others' mean time per token.
    :param first_ms: the same of their first tokens.
    """

    way: str
    seed: int
    long_tokens: int
    long_rate: float
    output_rate: float
    tpot_ms: tuple[float, float]
    first_ms: tuple[float, float]
    lent: int
    lost: int
    preemptions: int


def cluster_of(way: str, pool_gib: int) -> ClusterSpec:
    """Return instances of one host with little memory each."""
    spec = spec_of(way, pool_gib * GIB)
    names = [f"mixed-{i}" for i in range(INSTANCES)]
    hosts = {name: name for name in names} if spec.asks else {}
    return replace(
        spec,
        counts={"mixed": INSTANCES},
        hosts=None if way == "alone" else hosts,
        limits=limits_of(spec.layout, lends=way != "alone"),
        moves="none" if way == "alone" else "all",
    )


def rows_of(answer_tokens: int, rate: float, seconds: float, seed: int) -> list[TraceRow]:
    """Short requests at a rate, and the long one among them."""
    chance = Random(seed)
    rows, at_seconds = [TraceRow(LONG_STARTS_SECONDS, PROMPT_TOKENS, answer_tokens)], 0.0
    while at_seconds < seconds:
        at_seconds += chance.expovariate(rate)
        prompt, answer = (max(2, round(chance.expovariate(1 / SHORT_TOKENS))) for _ in range(2))
        rows.append(TraceRow(at_seconds, min(prompt, 2_000), min(answer, 2_000)))
    return sorted(rows, key=lambda row: row.arrival_s)


def long_answer(way: str, pool_gib: int, pools: float, rate: float, seed: int) -> LongAnswer:
    """One run.

    :param pools: length of the long request, in memories of one instance.
    """
    spec = cluster_of(way, pool_gib)
    alone_tokens = spec.limits.max_model_len
    most_tokens = max(alone_tokens, spec.limits.reach_tokens)
    answer_tokens = min(most_tokens, int(pools * alone_tokens)) - PROMPT_TOKENS
    rows = rows_of(answer_tokens, rate, answer_tokens * STEP_SECONDS, seed)
    run = VirtualCluster(spec, rows)
    run.start()
    at = next(index for index, row in enumerate(rows) if row.output_tokens == answer_tokens)
    long = run.front.requests[at]
    while long.finish_seconds is None and run.front.num_done < len(rows) and run.go_on():
        pass
    assert long.finish_seconds is not None and long.first_token_seconds is not None, "not served"
    begin, end = long.first_token_seconds, long.finish_seconds
    others = [
        (row.output_tokens, one.came_seconds, one.first_token_seconds, one.finish_seconds)
        for index, (one, row) in enumerate(zip(run.front.requests, rows, strict=True))
        if index != at
    ]
    served = [
        (tokens, came, first, last)
        for tokens, came, first, last in others
        if came is not None and first is not None and last is not None and begin <= last <= end
    ]
    paces = sorted(1e3 * (last - first) / (tokens - 1) for tokens, _, first, last in served)
    firsts = sorted(1e3 * (first - came) for _, came, first, _ in served)
    figures = cluster_figures(run)
    tokens = answer_tokens + sum(tokens for tokens, *_ in served)
    return LongAnswer(
        *(way, seed, answer_tokens, answer_tokens / (end - begin), tokens / (end - begin)),
        (median(paces), paces[len(paces) * 99 // 100]),
        (median(firsts), firsts[len(firsts) * 99 // 100]),
        *(figures["sections"]["lent"], figures["sections"]["lost"]),
        figures["roles"]["mixed"]["preemptions"],
    )


def show(one: LongAnswer) -> str:
    """One line of the table."""
    return (
        f"{one.way:<17} {one.seed:>4} {one.long_tokens:>7} {one.long_rate:>7.1f} "
        f"{one.output_rate:>7.0f} {one.tpot_ms[0]:>6.1f} {one.tpot_ms[1]:>6.1f} "
        f"{one.first_ms[0]:>7.0f} {one.first_ms[1]:>7.0f} "
        f"{one.lent:>5} {one.lost:>5} {one.preemptions:>7}"
    )


def main(arguments: Sequence[str] | None = None) -> list[LongAnswer]:
    """Run, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--pool-gib", type=int, default=4)
    parser.add_argument("--pools", type=float, default=2.0, help="length of the long request")
    parser.add_argument("--rate", type=float, default=8.0, help="short requests a second")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    print(
        "way               seed  tokens      /s   all/s TPOT 50,99 ms  first 50,99 ms"
        "  lent  lost preempt"
    )
    made: list[LongAnswer] = []
    for way in given.ways:
        for seed in given.seeds:
            made.append(long_answer(way, given.pool_gib, given.pools, given.rate, seed))
            print(show(made[-1]), flush=True)
    if given.json is not None:
        result_file.write(
            given.json, [asdict(each) for each in made], processor=result_file.VIRTUAL
        )
    return made


if __name__ == "__main__":
    main()
