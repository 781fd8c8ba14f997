"""Predicted and measured times to the first token of a server with several instances.

Run from the repository's root: ``python -m bench.routing.predicted``.  ``kvell serve`` runs with
its own calibration and with the default prices in turn.  Clients in closed loops send prompts of
mixed lengths, some of which begin like an earlier one.  The front's prediction when it chooses an
instance comes with each request's trace.  See README.md beside this file.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import msgspec
import numpy as np

from bench import result_file
from kvell.calibration.serving import server
from kvell.cli.terminal.environment import process_cache_dir
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import Wire
from kvell.models.sources.packaged import packaged_model
from tests.server.tracing.collector import Collector, attributes, collecting

LEVELS = (1, 3, 6)
"""Numbers of requests in flight."""
LEAST_TOKENS, MOST_TOKENS = 64, 3000
SHARING = 0.4
"""Part of the prompts that begin with half or more of an earlier one."""
OUTPUT_TOKENS = 16
VOCAB_SIZE = 49152
ORIGINS: Mapping[str, tuple[str, ...]] = {"calibrated": (), "defaults": ("--no-calibration",)}
DATA = b"data: {"
CACHE_DIR = "KVELL_CACHE_DIR"


@dataclass(frozen=True)
class Row:
    """One request.

    :param cached_tokens: tokens of the prompt that were not computed.
    :param predicted_seconds: from its arrival at the front to its first token.
    :param served_seconds: the same, as the front measured it.
    :param client_seconds: from sending the request to the first piece of its answer.
    """

    prompt_tokens: int
    cached_tokens: int
    predicted_seconds: float
    served_seconds: float
    client_seconds: float


@dataclass(frozen=True)
class Answer:
    """An answer's id, and its client's time to the first piece."""

    answer_id: str
    seconds: float


def prompts(count: int, draw: np.random.Generator) -> list[list[int]]:
    """Draw prompts whose lengths are uniform in their logarithm."""
    made: list[list[int]] = []
    low, high = np.log([LEAST_TOKENS, MOST_TOKENS])
    for tokens in np.exp(draw.uniform(low, high, count)).astype(int).tolist():
        prompt: list[int] = draw.integers(0, VOCAB_SIZE, tokens).tolist()
        if made and draw.random() < SHARING:
            earlier = made[int(draw.integers(len(made)))]
            kept = min(int(draw.uniform(0.5, 1.0) * len(earlier)), tokens - 1)
            prompt[:kept] = earlier[:kept]
        made.append(prompt)
    return made


async def answers(url: str, given: Sequence[list[int]], in_flight: int) -> list[Answer]:
    """Send prompts in order, at most ``in_flight`` at a time."""
    client, wire = HttpClient(url), Wire("smollm2")
    left = iter(given)
    collected: list[Answer] = []

    async def ask() -> None:
        for prompt in left:
            began_seconds = monotonic()
            seconds, answer_id = 0.0, ""
            body = wire.body({"prompt": prompt}, OUTPUT_TOKENS)
            async for _, piece in client.stream_of(wire.path, body):
                if not answer_id and DATA in piece:
                    seconds = monotonic() - began_seconds
                    line = piece[piece.index(DATA) + len(DATA) - 1 :].split(b"\n", 1)[0]
                    answer_id = msgspec.json.decode(line)["id"]
            collected.append(Answer(answer_id, seconds))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(ask())
    finally:
        client.close()
    return collected


def rows(collector: Collector, answered: Sequence[Answer]) -> Iterator[Row]:
    """Join answers with their traces."""
    known: dict[str, dict[str, Any]] = {}

    def all_came() -> bool:
        known.update(
            (values["gen_ai.response.id"], values)
            for values in map(attributes, collector.spans)
            if "gen_ai.response.id" in values
        )
        return all(answer.answer_id in known for answer in answered)

    collector.until(all_came)
    for answer in answered:
        values = known[answer.answer_id]
        yield Row(
            values["gen_ai.usage.input_tokens"],
            values["kvell.cached_tokens"],
            values["kvell.predicted_time_to_first_token"],
            values["gen_ai.latency.time_to_first_token"],
            answer.seconds,
        )


@contextmanager
def own_cache() -> Iterator[None]:
    """Give servers a cache directory of their own, so that each one calibrates at its start."""
    before = os.environ.get(CACHE_DIR)
    cache = process_cache_dir()
    model = packaged_model(cache)
    with TemporaryDirectory() as folder:
        (Path(folder) / model.name).symlink_to(model)
        os.environ[CACHE_DIR] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE_DIR]
            else:
                os.environ[CACHE_DIR] = before


def command(options: argparse.Namespace, collector: Collector, flags: Sequence[str]) -> list[str]:
    """The command line of a server whose requests the collector gets."""
    program = [sys.executable, "-m", "kvell.cli.main", "serve", "smollm2", "--port", "0", "--json"]
    program += ["--instances", options.instances, "--routing", "prompt-tree"]
    program += ["--kv-memory", options.kv_memory, "--otlp-traces-endpoint", collector.url]
    return [*program, *flags]


def measured(options: argparse.Namespace, seed: int, flags: Sequence[str]) -> dict[int, list[Row]]:
    """Start a server and run all levels; the first prompts of each do not count, since the front
    learns the pace of instances from them."""
    draw = np.random.default_rng(seed)
    levels: dict[int, list[Row]] = {}
    with (
        own_cache(),
        collecting() as collector,
        server(command(options, collector, flags)) as url,
    ):
        for level in options.levels:
            asyncio.run(answers(url, prompts(options.warm, draw), level))
            given = prompts(options.requests, draw)
            levels[level] = list(rows(collector, asyncio.run(answers(url, given, level))))
    return levels


def figures(level: Sequence[Row]) -> dict[str, Any]:
    """Relative errors of one level: quartiles of their sizes, and the median with its sign."""
    predicted = np.array([row.predicted_seconds for row in level])
    summary: dict[str, Any] = {"requests": len(level)}
    for name in ("client_seconds", "served_seconds"):
        seen = np.array([getattr(row, name) for row in level])
        misses = predicted / seen - 1
        low, middle, high = np.quantile(np.abs(misses), (0.25, 0.5, 0.75))
        summary[name] = {
            "error_quartiles": [round(float(x), 4) for x in (low, middle, high)],
            "signed_median": round(float(np.median(misses)), 4),
            "worst": round(float(np.abs(misses).max()), 4),
            "measured_median": round(float(np.median(seen)), 4),
        }
    return summary


def main() -> None:
    """Run all rounds and print a table; write a result file with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30, help="of each level and round")
    parser.add_argument("--warm", type=int, default=12, help="requests before each level")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="requests in flight")
    parser.add_argument("--origins", nargs="+", default=tuple(ORIGINS), choices=tuple(ORIGINS))
    parser.add_argument("--instances", default="mixed=3")
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--rows", action="store_true", help="also keep all requests")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    every: dict[str, dict[int, list[Row]]] = {name: {} for name in options.origins}
    for turn in range(options.rounds):
        for name in options.origins:
            for level, found in measured(options, turn, ORIGINS[name]).items():
                every[name].setdefault(level, []).extend(found)
    told = {
        name: {str(level): figures(found) for level, found in levels.items()}
        for name, levels in every.items()
    }
    print(f"{'prices':>12} {'in flight':>9} {'lower':>7} {'median':>7} {'upper':>7} {'signed':>7}")
    for name, levels in told.items():
        for in_flight, summary in levels.items():
            seen = summary["client_seconds"]
            shares = [*seen["error_quartiles"], seen["signed_median"]]
            print(f"{name:>12} {in_flight:>9}", *(f"{share:>7.1%}" for share in shares))
    if options.json:
        kept = {"rows": {n: _kept(levels) for n, levels in every.items()}} if options.rows else {}
        result_file.write(options.json, {"instances": options.instances, "figures": told, **kept})


def _kept(levels: Mapping[int, Sequence[Row]]) -> dict[str, list[dict[str, Any]]]:
    return {str(level): [asdict(row) for row in found] for level, found in levels.items()}


if __name__ == "__main__":
    main()
