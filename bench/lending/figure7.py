"""Tokens a second of a debtor and its creditor, by the number of sections that move (figure 7).

The performance model's prediction (equations 5 to 7) is shown beside what the engines make in
virtual time.  Run from the repository's root: ``python -m bench.lending.figure7``.  See README.md
beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench import result_file
from bench.lending.traces import spec_of
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.lending.planner import throughput_inputs
from kvell.cluster.steering.placements import Reading
from kvell.engine.protocol.statistics import LoadStats
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB, SECTION_TOKENS

DEBTOR, CREDITOR = "mixed-0", "mixed-1"
LONG = TraceRow(0.0, 55_000, 6_000)
SHORT_TOKENS = (50, 450)
"""Prompt and answer of the others, 500 tokens in all as in the paper."""
WAYS = ("one memory", "creditor computes")
SETTLING_SECONDS, WINDOW_SECONDS = 12.0, 20.0
"""From the order until the window begins, and the window, which is longer than a short request."""


@dataclass(frozen=True)
class Moved:
    """A run.

    :param wanted: sections that were ordered to move; ``lent``: those that the creditor took.
    :param model: tokens a second by equations 5 to 7, ``measured`` in virtual time; of debtor and
        creditor.
    :param batches: mean running requests in the window, of debtor and creditor.
    """

    way: str
    seats: int
    wanted: int
    lent: int
    model: tuple[float, float]
    measured: tuple[float, float]
    batches: tuple[float, float]
    preemptions: int


def pair(way: str, seats: int, pool_gib: int) -> ClusterSpec:
    """Two instances of one host that get requests in turn, and move only what they are told to."""
    spec = spec_of(way, pool_gib * GIB)
    limits = replace(spec.limits, max_num_seqs=seats)
    return replace(
        spec,
        counts={"mixed": 2},
        hosts={name: name for name in (DEBTOR, CREDITOR)} if spec.asks else {},
        limits=limits,
        routing="round-robin",
        steers=False,
    )


class Pair:
    """A debtor with a long request and a line, and a creditor whose line waits for seats."""

    def __init__(self, way: str, seats: int, pool_gib: int, requests: int) -> None:
        rows = [LONG, *(TraceRow(0.01 + 1e-4 * i, *SHORT_TOKENS) for i in range(requests))]
        self.cluster = VirtualCluster(pair(way, seats, pool_gib), rows)
        self.cluster.start()
        self._batches: list[tuple[int, int]] = []

    def run_until(self, seconds: float) -> None:
        """Let virtual time pass."""
        while self.cluster.loop.now_seconds < seconds and self.cluster.go_on():
            batches = [self._running(name) for name in (DEBTOR, CREDITOR)]
            self._batches.append((batches[0], batches[1]))

    def _running(self, name: str) -> int:
        return len(self.cluster.instances[name].core.running)

    def load(self, name: str) -> LoadStats:
        """What an instance would report now."""
        core = self.cluster.instances[name].core
        return core.counters.load_stats(core.step)

    def tokens(self) -> tuple[int, int]:
        """Output tokens of both so far."""
        counters = [self.cluster.instances[name].core.counters for name in (DEBTOR, CREDITOR)]
        return counters[0].output_tokens, counters[1].output_tokens

    def inputs(self, name: str) -> ThroughputInputs:
        """What the model reads; all memory is to be used that running requests will not need."""
        line, load = self.cluster.front.queue.lines[name], self.load(name)
        return throughput_inputs(line, line.facts, load, load.free_bytes - load.growth_bytes)

    def batches(self) -> tuple[float, float]:
        """Mean batches since the last call."""
        found = np.mean(self._batches, axis=0) if self._batches else np.zeros(2)
        self._batches = []
        return float(found[0]), float(found[1])


def predicted(run: Pair, sections: int) -> tuple[float, float]:
    """Tokens a second of both by the model, if so many sections move now."""
    facts = run.cluster.front.queue.lines[DEBTOR].facts
    model = PerformanceModel(facts.prices)
    count = np.array([float(sections)])
    size = count * SECTION_TOKENS, count * facts.section_bytes
    reading: Reading = "asked" if facts.is_asked else "in place"
    debtor, _ = model.borrowing(run.inputs(DEBTOR), *size, reading)
    return float(debtor[0]), float(model.creditor(run.inputs(CREDITOR), *size)[0])


def moved(way: str, seats: int, pool_gib: int, sections: int, requests: int) -> Moved:
    """One run: both fill up, sections move, and tokens are counted."""
    run = Pair(way, seats, pool_gib, requests)
    while not run.load(DEBTOR).longest or run.load(CREDITOR).running < seats:
        run.run_until(run.cluster.loop.now_seconds + 1.0)
    run.run_until(run.cluster.loop.now_seconds + SETTLING_SECONDS)
    model = predicted(run, sections)
    queue = run.cluster.front.queue
    for name, command in queue.move("0", CREDITOR, sections) if sections else []:
        run.cluster.instances[name].take(command)
    run.run_until(run.cluster.loop.now_seconds + SETTLING_SECONDS)
    run.batches()
    begin, before = run.cluster.loop.now_seconds, run.tokens()
    run.run_until(begin + WINDOW_SECONDS)
    seconds, after = run.cluster.loop.now_seconds - begin, run.tokens()
    lent = sum(part.num_blocks for part in run.load(DEBTOR).placements if not part.local)
    made = [(end - start) / seconds for start, end in zip(before, after, strict=True)]
    rates, batches = (made[0], made[1]), run.batches()
    preemptions = run.cluster.instances[DEBTOR].core.stats().preemptions
    return Moved(way, seats, sections, lent, model, rates, batches, preemptions)


def main(arguments: Sequence[str] | None = None) -> list[Moved]:
    """Run, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--seats", type=int, nargs="+", default=[64])
    parser.add_argument("--sections", type=int, nargs="+", default=[0, 10, 20, 40, 60, 80, 100])
    parser.add_argument("--pool-gib", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    print("way               seats wanted lent  model: debtor creditor sum   measured: the same")
    found: list[Moved] = []
    for way in given.ways:
        for seats in given.seats:
            for sections in given.sections:
                figures = moved(way, seats, given.pool_gib, sections, given.requests)
                found.append(figures)
                numbers = [*figures.model, sum(figures.model)]
                numbers += [*figures.measured, sum(figures.measured), *figures.batches]
                shown = " ".join(f"{number:>7.0f}" for number in numbers)
                head = f"{way:<17} {seats:>5} {sections:>6} {figures.lent:>4}"
                print(f"{head} {shown} {figures.preemptions:>5}", flush=True)
    if given.json is not None:
        result_file.write(
            given.json, [asdict(each) for each in found], processor=result_file.VIRTUAL
        )
    return found


if __name__ == "__main__":
    main()
