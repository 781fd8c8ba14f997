"""Whether a server keeps its memory contract for twenty minutes under a mixed load.

See README.md beside this file.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import machine, result_file
from bench.elastic.mixed_load import Asked, Mix, MixedLoad, Tally, figures
from bench.elastic.process_sizes import Sample, Sampler, import_bytes
from bench.side_by_side.processes import SystemProcess
from kvell.byte_sizes import parse_bytes
from kvell.clock import Clock, MonotonicClock
from kvell.load.http.client import HttpClient
from kvell.vocabulary import MIB

FRONT_MODULES = (
    "kvell.cli.main",
    "kvell.server.text.named_texts",
    "kvell.server.run",
    "kvell.server.http_face",
)
INSTANCE_MODULES = ("kvell.cli.main", "kvell.serving.lone", "kvell.llm")
"""Modules that each process has imported before it loads anything."""
LEAST_ALLOWANCE_BYTES, ALLOWANCE_SHARE = 64 * MIB, 0.03
START_SECONDS = 5.0
VOCAB_SIZE = 49_152
FIRST = Asked([1000, 2000, 3000, 4000], 1)
SERIES_SECONDS = 10.0
"""Interval of the written series; each point is the largest sample in it."""


@dataclass(frozen=True)
class Given:
    """What the server was started with, and its processes' size after imports alone; in bytes."""

    memory_bytes: int
    cpu_buffer_bytes: int
    front_import_bytes: int
    instance_import_bytes: int

    @property
    def most_bytes(self) -> int:
        """Most bytes that the contract may promise."""
        counted_bytes = self.memory_bytes + self.cpu_buffer_bytes
        imported_bytes = self.front_import_bytes + self.instance_import_bytes
        allowance_bytes = max(LEAST_ALLOWANCE_BYTES, int(ALLOWANCE_SHARE * self.memory_bytes))
        return counted_bytes + imported_bytes + allowance_bytes


@dataclass(frozen=True)
class Seen:
    """What was observed.

    :param contract_bytes: as ``/debug/memory`` has it.
    :param first_token_seconds: from the start of the process, of each start; the last is loaded.
    """

    contract_bytes: int
    max_model_len: int
    first_token_seconds: tuple[float, ...]
    samples: Sequence[Sample]
    tally: Tally

    @property
    def largest_bytes(self) -> int:
        """The largest of all samples."""
        return max(sample.size_bytes for sample in self.samples)


def verdicts(given: Given, seen: Seen) -> dict[str, bool]:
    """The clauses, and whether each was kept."""
    longest = seen.max_model_len - 1
    return {
        "never_above_the_contract": seen.largest_bytes <= seen.contract_bytes,
        "the_contract_is_tight": seen.contract_bytes <= given.most_bytes,
        "nothing_refused": not seen.tally.failures,
        "from_one_token_to_the_longest": seen.tally.shortest_prompt == 1
        and seen.tally.longest_prompt == longest,
        "first_token_in_time": min(seen.first_token_seconds) <= START_SECONDS,
    }


def series(samples: Sequence[Sample], every_seconds: float = SERIES_SECONDS) -> list[list[float]]:
    """(seconds, MiB): the largest sample of each interval."""
    most: dict[int, int] = {}
    for sample in samples:
        place = int(sample.seconds // every_seconds)
        most[place] = max(most.get(place, 0), sample.size_bytes)
    return [[place * every_seconds, round(size / MIB, 1)] for place, size in sorted(most.items())]


def get_json(url: str) -> Any:
    """Fetch a URL and parse its JSON."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


async def loaded(
    url: str, options: argparse.Namespace, longest_tokens: int, clock: Clock
) -> tuple[float, Tally]:
    """Clock time of the first request's first token, and the tally of the whole load."""
    client = HttpClient(url)
    try:
        mix = Mix(options.seed, longest_tokens, VOCAB_SIZE)
        load = MixedLoad(client, options.model, mix)
        await load.ask(FIRST)
        first_seconds = clock.now_seconds()
        for tokens in (1, longest_tokens - 1):  # whatever is drawn, both ends are asked
            await load.ask(Asked([FIRST.prompt[0]] * tokens, 1))
        return first_seconds, await load.run(options.workers, 60.0 * options.minutes)
    finally:
        client.close()


def serve_command(options: argparse.Namespace) -> list[str]:
    """The command line of ``kvell serve`` on a free port."""
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    command += ["--model", options.model, "--memory", options.memory]
    command += ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    if options.cpu_buffer:
        command += ["--cpu-buffer", options.cpu_buffer, "--slo-ttft", "5", "--slo-tpot", "1"]
    return command


def launched(options: argparse.Namespace, log: Path) -> SystemProcess:
    """A server that is starting."""
    loud = {"PYTHONFAULTHANDLER": "1"}  # an instance that crashes says where
    return SystemProcess(serve_command(options), log, loud, talks=True)


def address(process: SystemProcess) -> str:
    """Wait until the server announces its URL; return it."""
    return str(json.loads(process.hear())["url"])


def start_seconds(options: argparse.Namespace, log: Path) -> float:
    """From a server's start to its first token."""
    clock = MonotonicClock()
    began_seconds = clock.now_seconds()
    process = launched(options, log)
    try:
        asyncio.run(first_answer(address(process), options))
        return clock.now_seconds() - began_seconds
    finally:
        process.end()


async def first_answer(url: str, options: argparse.Namespace) -> None:
    """One token of a short prompt."""
    client = HttpClient(url)
    try:
        await MixedLoad(client, options.model, Mix(options.seed, 1, VOCAB_SIZE)).ask(FIRST)
    finally:
        client.close()


def watched(options: argparse.Namespace, log: Path) -> tuple[Seen, dict[str, Any]]:
    """Run a server from its start to the end of its load; also returns ``/debug/memory``.

    Other servers are started and ended before it, to time the start.
    """
    starts = [start_seconds(options, log) for _ in range(options.starts - 1)]
    clock = MonotonicClock()
    began_seconds = clock.now_seconds()
    process = launched(options, log)
    sampler = Sampler(process.process.pid, clock)
    try:
        url = address(process)
        [card] = get_json(f"{url}/v1/models")["data"]
        length = int(card["max_model_len"])
        first_seconds, tally = asyncio.run(loaded(url, options, length, clock))
        page = get_json(f"{url}/debug/memory")
    finally:
        samples = sampler.stop()
        process.end()
    starts.append(first_seconds - began_seconds)
    return Seen(page["contract_bytes"], length, tuple(starts), samples, tally), page


def lines(given: Given, seen: Seen, kept: dict[str, bool]) -> list[str]:
    """The report as text."""
    tally, starts = seen.tally, seen.first_token_seconds
    return [
        f"contract {seen.contract_bytes / MIB:,.1f} MiB, at most {given.most_bytes / MIB:,.1f} "
        f"allowed; largest of {len(seen.samples)} samples {seen.largest_bytes / MIB:,.1f} MiB",
        f"{tally.completed} answers, prompts of {tally.shortest_prompt} to {tally.longest_prompt} "
        f"tokens, {tally.hung_up} clients hung up, failures: {dict(tally.failures) or 'none'}",
        f"first token {min(starts):.2f} s after the start (best of {len(starts)}, median "
        f"{median(starts):.2f})",
        *(f"  {'kept' if is_kept else 'NOT KEPT'}: {name}" for name, is_kept in kept.items()),
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--memory", default="768MiB")
    parser.add_argument("--cpu-buffer", default="256MiB", help="'' for none")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--starts", type=int, default=5, help="of the server, for their time")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print the verdicts; exit with 1 if one was not kept."""
    options = arguments()
    given = Given(
        parse_bytes(options.memory, "--memory"),
        parse_bytes(options.cpu_buffer, "--cpu-buffer") if options.cpu_buffer else 0,
        import_bytes(FRONT_MODULES),
        import_bytes(INSTANCE_MODULES),
    )
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        seen, page = watched(options, log)
        said = log.read_text(errors="replace").splitlines()
    kept = verdicts(given, seen)
    print("\n".join(lines(given, seen, kept)), flush=True)
    if not kept["nothing_refused"]:
        print("\n".join(["the server said last:", *said[-40:]]), flush=True)
    if options.json:
        report = {
            "machine": machine.describe(),
            "arguments": {k: v for k, v in vars(options).items() if k != "json"},
            "given": asdict(given) | {"most_bytes": given.most_bytes},
            "contract_bytes": seen.contract_bytes,
            "largest_bytes": seen.largest_bytes,
            "samples": len(seen.samples),
            "first_token_seconds": seen.first_token_seconds,
            "kept": kept,
            "load": figures(seen.tally),
            "memory": page,
            "mib_by_seconds": series(seen.samples),
        }
        result_file.write(options.json, report)
    raise SystemExit(0 if all(kept.values()) else 1)


if __name__ == "__main__":
    main()
