"""Milliseconds of a plan of loans, by the number of instances.

Run from the repository's root: ``python -m bench.lending.planner``.  See README.md beside this
file.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import result_file
from bench.cpu_clock import CpuClock
from kvell.cluster.instance_load import NO_FACTS, InstanceLoad
from kvell.cluster.steering.lending.planner import LoanPlanner
from kvell.cluster.steering.steering import LOOK_SECONDS
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import (
    MOST_LONGEST,
    InstanceFacts,
    InstanceReport,
    LoadStats,
)
from kvell.vocabulary import GIB, SECTION_TOKENS, RequestId

INSTANCES = (8, 64, 1000)
HOST_SIZES = (8, 1000)
"""Instances of a host: as many as devices, and so many that all are of one."""
BLOCK_BYTES = 256 << 20
POOL_BYTES = 60 * GIB
GOAL_MILLISECONDS = 100.0


@dataclass(frozen=True)
class Planned:
    """What planning takes.

    :param host_size: most instances of a host.
    :param milliseconds: of each round, on this thread's own clock.
    :param moves: of a round.
    """

    instances: int
    host_size: int
    milliseconds: list[float]
    moves: int


@dataclass(eq=False)
class Party(InstanceLoad):
    """A serving instance; its memory is as in its report."""

    instance_id: str = ""
    waiting: int = 0
    free_bytes: int = 0
    report: InstanceReport = field(default_factory=lambda: InstanceReport(NO_FACTS))
    pool_bytes: int = POOL_BYTES
    memory_waiting: int = 0
    num_leaving: int = 0
    num_coming: int = 0
    role: str = "mixed"
    can_take: bool = True


def party(number: int, host_size: int) -> Party:
    """Every second instance is short, with requests that wait; the others have memory."""
    name, is_short = f"mixed-{number}", number % 2 == 0
    blocks = POOL_BYTES // BLOCK_BYTES
    free = 6 + number % 5 if is_short else blocks // 2 + number % 40
    waiting, free_bytes = 8 if is_short else 0, free * BLOCK_BYTES
    facts = InstanceFacts(
        *(1, 1, "", 0, POOL_BYTES),
        token_bytes=BLOCK_BYTES // SECTION_TOKENS,
        section_bytes=BLOCK_BYTES,
        host=str(number // host_size),
    )
    load = LoadStats(
        *(1, 4, waiting, 1, 1, free_bytes, POOL_BYTES),
        held_tokens=(blocks - free) * SECTION_TOKENS,
        waiting_tokens=waiting * 1_000,
        memory_waiting=waiting,
        head_tokens=1_000,
        head_bytes=1_000 * BLOCK_BYTES // SECTION_TOKENS,
        longest=tuple(
            RequestPlacementEntry(RequestId(f"{number}:{index}"), name, 110 - index, local=True)
            for index in range(MOST_LONGEST)
        ),
    )
    return Party(name, waiting, free_bytes, InstanceReport(facts, load))


def measured(count: int, host_size: int, rounds: int) -> Planned:
    """Plan for the same view again and again, each time without any reservation."""
    clock, taken, moves = CpuClock(), [], 0
    instances = [party(number, host_size) for number in range(count)]
    for _ in range(rounds):
        planner = LoanPlanner(LOOK_SECONDS)
        before = clock.now_seconds()
        moves = len(planner.plan(instances))
        taken.append((clock.now_seconds() - before) * 1e3)
    return Planned(count, host_size, taken, moves)


def table(found: Sequence[Planned]) -> str:
    """One line for each number of instances."""
    lines = [f"{'instances':>9} {'of a host':>9} {'moves':>6} {'ms':>8}  range"]
    for one in found:
        low, high = min(one.milliseconds), max(one.milliseconds)
        middle = statistics.median(one.milliseconds)
        sizes = f"{one.instances:>9} {min(one.host_size, one.instances):>9} {one.moves:>6}"
        lines.append(f"{sizes} {middle:>8.2f}  {low:.2f}-{high:.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Planned]:
    """Measure, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=INSTANCES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    found = [
        measured(count, size, asked.rounds)
        for count in asked.instances
        for size in HOST_SIZES
        if size == HOST_SIZES[0] or count > HOST_SIZES[0]
    ]
    print(table(found))
    if asked.json is not None:
        result_file.write(asked.json, [asdict(one) for one in found])
    return found


if __name__ == "__main__":
    main()
