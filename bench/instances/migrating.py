"""How long a request pauses that goes on at another instance: migrated, or computed again there.

Two real instances; requests with long contexts decode at one, which is then drained, in turn with
time to hand them on and with none:

``python -m bench.instances.migrating --rounds 5``
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import result_file
from kvell import AsyncEngine, SamplingParams
from kvell.fleet.started.front_limits import FrontLimits
from kvell.vocabulary import MIB

MODEL = "smollm2"
SETTLED_TOKENS = 8
"""Tokens that each request has before the instance is drained, and afterwards."""
DRAIN_SECONDS = {"migrated": 60.0, "computed again": 0.0}


@dataclass
class Stream:
    """When each token of a request came."""

    times: list[float] = field(default_factory=list)

    async def read(self, engine: AsyncEngine, prompt: list[int], name: str) -> None:
        """Follow one request to its end."""
        params = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True)
        seen = 0
        async for output in engine.generate(prompt, params, request_id=name):
            now, count = time.perf_counter(), len(output.token_ids)
            self.times += [now] * (count - seen)
            seen = count

    def pause_seconds(self, since: float) -> float:
        """The longest time between two tokens, the later of which came after ``since``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(after - before for before, after in pairs if after >= since)


async def until(condition: Any) -> None:
    """Wait until something holds."""
    while not condition():
        await asyncio.sleep(0.005)


async def drained(way: str, context: int, requests: int) -> dict[str, float]:
    """Seconds of the longest pause of a request, and until the instance is gone."""
    engine = AsyncEngine(
        MODEL,
        instances="mixed=2",
        limits=FrontLimits(drain_seconds=DRAIN_SECONDS[way]),
        kv_memory_bytes=512 * MIB,
        max_model_len=4096,
    )
    random = np.random.default_rng(1)
    async with engine:
        streams = [Stream() for _ in range(requests)]
        tasks = []
        for number, stream in enumerate(streams):
            prompt = random.integers(20, 40_000, context).tolist()
            tasks.append(asyncio.create_task(stream.read(engine, prompt, f"r{number}")))
        await until(lambda: all(len(one.times) >= SETTLED_TOKENS for one in streams))
        entries = engine._front.entries().in_flight
        leaving = [int(one.request_id[1:]) for one in entries if one.line == "mixed-0"]
        usual = median(
            after - before
            for number in leaving
            for before, after in zip(
                streams[number].times[-6:], streams[number].times[-5:], strict=False
            )
        )
        counts = {number: len(streams[number].times) for number in leaving}
        begun = time.perf_counter()
        engine.drain("mixed-0")
        await until(lambda: len(engine.instances()) == 1)
        gone_seconds = time.perf_counter() - begun
        enough = {number: count + SETTLED_TOKENS for number, count in counts.items()}
        await until(lambda: all(len(streams[n].times) >= count for n, count in enough.items()))
        pauses = [streams[number].pause_seconds(begun) for number in leaving]
        again = sum(entry.attempt > 0 for entry in engine._front.entries()[0])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "pause_seconds": max(pauses),
        "gone_seconds": gone_seconds,
        "usual_seconds": usual,
        "left": len(leaving),
        "computed_again": again,
    }


def main(given: Sequence[str] | None = None) -> None:
    """Print a table, and write it to the bench's result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 3072])
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--json", type=Path, default=result_file.path_of("migrating"))
    options = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in DRAIN_SECONDS}
        for _ in range(options.rounds):
            for way, found in runs.items():
                found.append(asyncio.run(drained(way, context, options.requests)))
        for way, found in runs.items():
            pauses = [one["pause_seconds"] for one in found]
            rows.append(
                {
                    "way": way,
                    "context_tokens": context,
                    "pause_seconds": median(pauses),
                    "pause_range": [min(pauses), max(pauses)],
                    "usual_seconds": median(one["usual_seconds"] for one in found),
                    "gone_seconds": median(one["gone_seconds"] for one in found),
                    "left": sum(one["left"] for one in found),
                    "computed_again": sum(one["computed_again"] for one in found),
                }
            )
    table = Table("context", "way", "longest pause, s", "range", "usual, s", "gone, s", "again")
    for one in rows:
        low, high = one["pause_range"]
        table.add_row(
            f"{one['context_tokens']:,}",
            one["way"],
            f"{one['pause_seconds']:.3f}",
            f"{low:.3f}–{high:.3f}",
            f"{one['usual_seconds']:.3f}",
            f"{one['gone_seconds']:.2f}",
            f"{one['computed_again']} of {one['left']}",
        )
    Console().print(table)
    result_file.write(options.json, rows)


if __name__ == "__main__":
    main()
