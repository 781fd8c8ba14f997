"""Microseconds that the front spends on a heartbeat, by the number of instances.

Run from the repository's root: ``python -m bench.fleet.heartbeats``.  Real frames, supervisors,
queue and steering; no instance computes anything.  See README.md beside this file.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import result_file
from bench.cpu_clock import CpuClock
from kvell.clock import VirtualClock
from kvell.engine.protocol.codec import encode_frame
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Heartbeat, MigrationRefused, Ready
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.instance_line import InstanceLine
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.front import Front
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId

INSTANCES = (8, 64, 1000)
FLEET_RATE = 100.0
"""Heartbeats a second of the whole fleet, of the goal of at most a tenth of a core."""
POOL_BYTES = 1 << 30
TOKEN_BYTES = 1 << 10
SHORT_EVERY = 10
"""With shortage, one instance of so many is short of memory."""
REQUESTS = 8
"""That each instance has."""
PROMPT_TOKENS = 100
WHEN = ("no shortage", "shortage", "roles")


@dataclass(frozen=True)
class Cost:
    """What heartbeats cost the front.

    :param beats_per_second: of the whole fleet, in the front's time.
    :param cores: that heartbeats take at this rate.
    :param moves: that were ordered.
    """

    instances: int
    when: str
    beats_per_second: float
    microseconds: float
    cores: float
    moves: int


class Fleet:
    """A front, and lines on which instances say heartbeats.

    :param when: one of :data:`WHEN`.
    """

    def __init__(self, count: int, when: str) -> None:
        self.clock = VirtualClock()
        pool = PoolSettings(adaptive_roles=when == "roles")
        self.front = Front(("none",), clock=self.clock, pool=pool)
        self.queue = self.front._request_queue
        self.lines: list[tuple[InstanceLine, bytes]] = []
        kinds = ("prefill", "decode") if when == "roles" else ("mixed",)
        for number in range(count):
            member = self.front.own()._add(kinds[number % len(kinds)])
            supervisor = member.supervisor
            supervisor.state = "serving"
            name = member.instance_id
            ready = Ready(16, 1, 1024, "none", 4096, POOL_BYTES, token_bytes=TOKEN_BYTES)
            self.queue.open(
                *(name, ready.credits, 1),
                free_bytes=POOL_BYTES,
                token_bytes=TOKEN_BYTES,
                joins_others=False,
            )
            line = InstanceLine()
            line.hear = supervisor._heard
            is_short = when == "shortage" and number % SHORT_EVERY == 0
            free_bytes = POOL_BYTES // (16 if is_short else 2)
            beat = Heartbeat(1, 9, REQUESTS, 0, 64, 32, free_bytes, POOL_BYTES)
            self.lines.append((line, encode_frame(beat)))
        self._fill(count)

    def _fill(self, count: int) -> None:
        """Give each instance requests that decode; to route them is not what is measured."""
        prompt = np.zeros(PROMPT_TOKENS, "<i4").tobytes()
        lines = list(self.queue.lines.values())
        for number in range(count * REQUESTS):
            sampling = SamplingParams(max_tokens=1000)
            entry = LogEntry(RequestId(f"r{number}"), prompt, sampling, "", 0.0)
            line = lines[number % count]
            self.queue._in_flight.submit(entry, line, 0.0)
            line.emitted(entry, 1)

    def beats(self, count: int, seconds_apart: float) -> None:
        """Say so many heartbeats, one instance after the other."""
        lines = self._in_turn()
        for _ in range(count):
            self.clock.advance(seconds_apart)
            line, frame = next(lines)
            line.data_received(frame)

    def take_moves(self) -> int:
        """Count requests that were to move, and let all stay."""
        moving = [one for one in self.queue.entries()[0] if one.goes_to]
        for one in moving:
            self.queue.stays(MigrationRefused(one.request_id, one.attempt))
        return len(moving)

    def _in_turn(self) -> Iterator[tuple[InstanceLine, bytes]]:
        while True:
            yield from self.lines


def measured(count: int, when: str, beats_per_second: float, seconds: int) -> Cost:
    """The median of so many seconds of the front's time, each of which has one decision."""
    fleet, clock = Fleet(count, when), CpuClock()
    beats = max(1, round(beats_per_second))
    fleet.beats(max(beats, count), 1 / beats_per_second)
    taken, moves = [], 0
    for _ in range(seconds):
        moves += fleet.take_moves()
        rounds = max(1, 2000 // beats)  # the clock of CPU time is coarse
        before = clock.now_seconds()
        fleet.beats(beats * rounds, 1 / beats_per_second)
        taken.append((clock.now_seconds() - before) / (beats * rounds))
    moves += fleet.take_moves()
    microseconds = statistics.median(taken) * 1e6
    cores = microseconds * 1e-6 * beats_per_second
    return Cost(count, when, beats_per_second, microseconds, cores, moves)


def table(costs: Sequence[Cost]) -> str:
    """One line for each cost."""
    lines = [
        f"{'instances':>9} {'when':<12} {'beats/s':>8} {'us/beat':>8} {'cores':>7} {'moves':>6}"
    ]
    lines += [
        f"{one.instances:>9} {one.when:<12} {one.beats_per_second:>8.0f} "
        f"{one.microseconds:>8.1f} {one.cores:>7.4f} {one.moves:>6}"
        for one in costs
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Cost]:
    """Measure, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=INSTANCES)
    parser.add_argument("--seconds", type=int, default=9, help="Of the front's time, for each.")
    parser.add_argument("--json", type=Path, help="Write the figures here, too.")
    asked = parser.parse_args(arguments)
    costs = [
        measured(count, when, count / HEARTBEAT_SECONDS, asked.seconds)
        for when in WHEN
        for count in asked.instances
    ]
    largest = max(asked.instances)
    costs += [measured(largest, when, FLEET_RATE, asked.seconds) for when in WHEN]
    print(table(costs))
    if asked.json is not None:
        result_file.write(asked.json, [asdict(one) for one in costs])
    return costs


if __name__ == "__main__":
    main()
