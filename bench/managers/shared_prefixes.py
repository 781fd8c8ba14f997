"""Hits under pressure, as in Jenga's slides and figure 17: the gain of policies that know windows,
and the further gain of protecting shared prefixes.

Run from the repository's root: ``python -m bench.managers.shared_prefixes --traces DIR``.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import result_file
from bench.managers.ours import replayed
from bench.replay.shapes import Shape, read_shape
from kvell.cli.replay.command import replay_limits
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.memory import Layout, Manager
from kvell.simulator.replay.replay import MAX_NUM_SEQS
from kvell.simulator.traces.generators import QUESTIONS_PER_ARTICLE, generate_trace
from kvell.simulator.traces.rows import TraceRow, ideal_hit_rate
from kvell.simulator.traces.trace import read_trace
from kvell.vocabulary import GIB

RESULTS = result_file.path_of("shared_prefixes", result_file.VIRTUAL)
SHAPE = "gemma3-27b"
ARTICLES, MOONCAKE = "arxiv-qa", "mooncake-conversation"
MOONCAKE_REQUESTS = 1_000
MOST_ARTICLES = 20
ARTICLE_POOLS_GIB = (56, 64, 72, 80, 96, 112, 128, 160)
MOONCAKE_POOLS_GIB = (256, 384, 512, 768, 1024, 1280, 1536, 2048)
FITTING_ARTICLES = 3
"""Articles that fit a pool in which LRU over all layers loses nothing."""
MOST_FITTING_GIB = 512
SEED = 0


@dataclass(frozen=True)
class Workload:
    """A workload and its pools.

    :param slides: hit rate of "Full Attention" in Jenga's slides, by which the pool is chosen.
    :param least: least gain of knowing the windows; 0: reported only.
    :param max_num_seqs: requests at once. With one, running requests take no cached memory.
    """

    name: str
    trace: str
    pools_gib: Sequence[int]
    slides: float
    least: float
    max_num_seqs: int = MAX_NUM_SEQS


WORKLOADS = (
    Workload("arxiv-qa, one at a time", ARTICLES, ARTICLE_POOLS_GIB, 0.024, 3.0, 1),
    Workload("arxiv-qa, all at once", ARTICLES, ARTICLE_POOLS_GIB, 0.024, 0.0),
    Workload(MOONCAKE, MOONCAKE, MOONCAKE_POOLS_GIB, 0.141, 1.1),
)


@dataclass(frozen=True)
class Rule:
    """One side: a manager, and whether it protects shared prefixes."""

    name: str
    manager: Manager
    common_pool: bool = False


RULES = (
    Rule("over all layers", "paged"),
    Rule("customised", "kvell"),
    Rule("customised + pool", "kvell", common_pool=True),
)


@dataclass(frozen=True)
class Pool:
    """Hit rates of every rule in one pool.

    :param hits: part of all prompt tokens, by the rule's name.
    :param requests_refused: longer than the pool holds, by the rule's name.
    """

    workload: str
    pool_bytes: int
    hits: Mapping[str, float]
    requests_refused: Mapping[str, int]

    def gain(self, rule: int) -> float:
        """Hits of a rule over those of the rule before it."""
        before, after = (self.hits[RULES[i].name] for i in (rule - 1, rule))
        return after / before if before else float("inf")


@dataclass(frozen=True)
class Sweep:
    """One number of articles, in the pool that holds :data:`FITTING_ARTICLES` over all layers."""

    articles: int
    pool_bytes: int
    hits: Mapping[str, float]
    ideal: float


def articles(count: int) -> list[TraceRow]:
    """``count`` articles, five questions each, in random order."""
    return generate_trace(ARTICLES, count * QUESTIONS_PER_ARTICLE, SEED)


def hit_rate(
    shape: Shape,
    rows: Sequence[TraceRow],
    pool_bytes: int,
    rule: Rule,
    max_num_seqs: int = MAX_NUM_SEQS,
) -> tuple[float, int]:
    """Part of the prompt tokens that were cached, and how many requests were refused."""

    def limits_of(layout: Layout, longest: int) -> Limits:
        limits: Limits = replay_limits(layout, longest, common_pool=rule.common_pool)
        return replace(limits, max_num_seqs=max_num_seqs)

    run = replayed(shape, rows, pool_bytes, rule.manager, limits_of=limits_of)
    return float(run.report()["hit_rate"]), run.requests_refused


def in_pool(
    shape: Shape,
    workload: Workload,
    rows: Sequence[TraceRow],
    pool_bytes: int,
    done: Callable[[], None],
) -> Pool:
    """Every rule in one pool."""
    hits, refused = {}, {}
    for rule in RULES:
        hits[rule.name], refused[rule.name] = hit_rate(
            shape, rows, pool_bytes, rule, workload.max_num_seqs
        )
        done()
    return Pool(workload.name, pool_bytes, hits, refused)


def closest(pools: Sequence[Pool], rate: float) -> Pool:
    """Of the pools that refuse nobody, the one where the first rule's hit rate is closest."""
    serving = [pool for pool in pools if not any(pool.requests_refused.values())]
    return min(serving, key=lambda pool: abs(pool.hits[RULES[0].name] - rate))


def fitting_pool_bytes(
    shape: Shape, rows: Sequence[TraceRow], most_gib: int, done: Callable[[], None]
) -> int:
    """The smallest pool, in whole GiB, in which the first rule loses no hits."""
    low, high = 1, most_gib
    while low < high:
        middle = (low + high) // 2
        if _loses(shape, rows, middle * GIB):
            low = middle + 1
        else:
            high = middle
        done()
    return low * GIB


def _loses(shape: Shape, rows: Sequence[TraceRow], pool_bytes: int) -> bool:
    try:
        rate, refused = hit_rate(shape, rows, pool_bytes, RULES[0])
    except ChangeSomething:  # not one request fits
        return True
    return refused > 0 or rate < ideal_hit_rate(rows) * 0.995


def sweep(shape: Shape, pool_bytes: int, done: Callable[[], None]) -> Iterator[Sweep]:
    """One to twenty articles in one pool (Jenga, figure 17)."""
    for count in range(1, MOST_ARTICLES + 1):
        rows = articles(count)
        pool = in_pool(shape, WORKLOADS[1], rows, pool_bytes, done)
        yield Sweep(count, pool_bytes, pool.hits, ideal_hit_rate(rows))


def pools_table(console: Console, workload: Workload, pools: Sequence[Pool], chosen: Pool) -> None:
    """Print the whole sweep, with the chosen pool marked."""
    slides = f"slides: {workload.slides:.3f} over all layers"
    table = Table(title=f"{SHAPE}, {workload.name}: hit rates; {slides}")
    for column in ("pool, GiB", *(rule.name for rule in RULES), "customised ×", "pool ×", ""):
        table.add_column(column, justify="right")
    for pool in pools:
        refused = max(pool.requests_refused.values())
        remark = "chosen" if pool is chosen else f"{refused} refused" if refused else ""
        rates = (f"{rate:.4f}" for rate in pool.hits.values())
        gains = (f"{pool.gain(1):.2f}", f"{pool.gain(2):.2f}")
        table.add_row(f"{pool.pool_bytes / GIB:.0f}", *rates, *gains, remark)
    console.print(table)


def sweep_table(console: Console, sweeps: Sequence[Sweep]) -> None:
    """Print hits by number of articles."""
    table = Table(title=f"Articles in {sweeps[0].pool_bytes / GIB:.0f} GiB, five questions each")
    for column in ("articles", *(rule.name for rule in RULES), "ideal", "customised ×"):
        table.add_column(column, justify="right")
    for each in sweeps:
        rates = [each.hits[rule.name] for rule in RULES]
        ratio = rates[1] / rates[0] if rates[0] else float("inf")
        row = (*(f"{rate:.4f}" for rate in rates), f"{each.ideal:.4f}", f"{ratio:.2f}")
        table.add_row(str(each.articles), *row)
    console.print(table)


def verdicts(chosen: Mapping[str, Pool], sweeps: Sequence[Sweep]) -> dict[str, bool]:
    """The bounds by their text, and whether each is kept."""
    few = [s for s in sweeps if s.articles <= FITTING_ARTICLES]
    plain, ours = RULES[0].name, RULES[1].name
    best = max(s.hits[ours] / s.hits[plain] if s.hits[plain] else float("inf") for s in sweeps)
    held = {
        f"{one.name}: customised {chosen[one.name].gain(1):.2f} times, at least {one.least:g}": (
            chosen[one.name].gain(1) >= one.least
        )
        for one in WORKLOADS
        if one.least
    }
    return held | {
        f"equal up to {FITTING_ARTICLES} articles": all(
            abs(s.hits[ours] - s.hits[plain]) <= 0.005 for s in few
        ),
        f"up to 1.6 times or more ({best:.2f})": best >= 1.6,
    }


def main() -> int:
    """Measure, print, write JSON; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    console, shape = Console(width=140), read_shape(SHAPE)
    rows = {
        ARTICLES: articles(MOST_ARTICLES),
        MOONCAKE: read_trace(options.traces / f"{MOONCAKE}.jsonl.gz", MOONCAKE_REQUESTS),
    }
    pools: dict[str, list[Pool]] = {}
    with Progress(console=Console(stderr=True)) as bar:
        pools_count = sum(len(one.pools_gib) for one in WORKLOADS)
        task = bar.add_task("replays", total=9 + len(RULES) * (MOST_ARTICLES + pools_count))

        def done() -> None:
            bar.advance(task)

        for one in WORKLOADS:
            pools[one.name] = [
                in_pool(shape, one, rows[one.trace], n * GIB, done) for n in one.pools_gib
            ]
        few = articles(FITTING_ARTICLES)
        fitting_bytes = fitting_pool_bytes(shape, few, MOST_FITTING_GIB, done)
        sweeps = list(sweep(shape, fitting_bytes, done))
    chosen = {one.name: closest(pools[one.name], one.slides) for one in WORKLOADS}
    for one in WORKLOADS:
        pools_table(console, one, pools[one.name], chosen[one.name])
    sweep_table(console, sweeps)
    held = verdicts(chosen, sweeps)
    for says, holds in held.items():
        console.print(f"{'kept' if holds else 'MISSED'}: {says}")
    written = {
        "pools": [asdict(pool) for each in pools.values() for pool in each],
        "chosen_bytes": {name: pool.pool_bytes for name, pool in chosen.items()},
        "articles": [asdict(each) for each in sweeps],
        "verdicts": held,
    }
    result_file.write(options.out, written, processor=result_file.VIRTUAL)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
