"""Roles that follow a swinging load beside ones that stay, with real processes on this machine.

Servers over HTTP in turn get the same requests, first many tokens of prompts and then many of
answers::

    python -m bench.routing.roles_served --rounds 2
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import result_file
from bench.routing.swings import Half, swinging
from bench.side_by_side.processes import SystemProcess
from kvell.load.arrivals import hang_ups
from kvell.load.driver import Load
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import Client, Wire
from kvell.load.prompts import Answer, Ids, Prompts, TokenSource
from kvell.load.report import Objectives, summary
from kvell.load.run import measure
from kvell.simulator.traces.rows import TraceRow

MODEL, VOCABULARY = "smollm2", 49_152
KVELL = [sys.executable, "-m", "kvell.cli.main"]
START_SECONDS = 240.0
LOOK_SECONDS = 0.5
WAYS: Mapping[str, Sequence[str]] = {"roles stay": (), "roles follow": ("--adaptive-roles",)}
Roles = Mapping[str, str]
"""What each instance does."""


class KeptPrompts(Prompts[list[int]]):
    """Prompts of token ids.

    :ivar answers: token ids of each answer, by request.
    """

    def __init__(self, rows: Sequence[TraceRow], seed: int) -> None:
        source = TokenSource.of_vocabulary(seed, VOCABULARY)
        super().__init__(rows, source, "prompt", Ids.tolist, lambda answer: answer.token_ids)
        self.answers: dict[int, list[int]] = {}

    def answered(self, index: int, answer: Answer) -> None:
        """Keep an answer."""
        self.answers[index] = answer.token_ids
        super().answered(index, answer)


@dataclass
class RoleWatch:
    """Looks now and then at what instances do.

    :ivar seen: the roles at each look at which some were others than before.
    """

    client: Client
    seen: list[tuple[float, Roles]] = field(default_factory=list)

    async def look_on(self) -> None:
        """Look until cancelled; times are from the first look."""
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        while True:
            _, body = await self.client.get("/cluster")
            roles = {one["id"]: one["serves_as"] for one in json.loads(body)["instances"]}
            if not self.seen or self.seen[-1][1] != roles:
                self.seen.append((loop.time() - begun_seconds, roles))
            await asyncio.sleep(LOOK_SECONDS)


def changes_of(seen: Sequence[tuple[float, Roles]]) -> list[tuple[float, str, str]]:
    """When which instance changed to which role; one that changes between two looks is missed."""
    return [
        (at_seconds, name, after[name])
        for (_, before), (at_seconds, after) in pairwise(seen)
        for name in after
        if before.get(name) != after[name]
    ]


def wrong_answers(
    answers: Mapping[int, Sequence[int]],
    reference: Mapping[int, Sequence[int]],
    rows: Sequence[TraceRow],
) -> dict[str, int]:
    """How many answers have other tokens than those of another server, or another number of tokens
    than were asked for."""
    both = answers.keys() & reference.keys()
    return {
        "other_tokens": sum(list(answers[one]) != list(reference[one]) for one in both),
        "other_length": sum(
            len(one) != rows[index].output_tokens for index, one in answers.items()
        ),
    }


@dataclass(frozen=True)
class Setting:
    """What servers get, and how long they may take.

    :param instances: ``--instances`` of every server.
    """

    instances: str
    flags: Sequence[str]
    objectives: Objectives


@dataclass(frozen=True)
class Served:
    """What a server did with a load."""

    figures: dict[str, Any]
    answers: Mapping[int, Sequence[int]]
    changes: Sequence[tuple[float, str, str]]


def served(way: str, setting: Setting, rows: Sequence[TraceRow], seed: int, folder: Path) -> Served:
    """Start a server, load it, end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    flags = [f"--instances={setting.instances}", *setting.flags, *WAYS[way]]
    command = [*KVELL, "serve", "--model", MODEL, "--port", str(port), *flags]
    process = SystemProcess(command, folder / "server.log", {})
    try:
        process.wait_for(f"{url}/health", START_SECONDS)
        return asyncio.run(_loaded(url, setting.objectives, rows, seed))
    finally:
        process.end()


async def _loaded(url: str, objectives: Objectives, rows: Sequence[TraceRow], seed: int) -> Served:
    client, prompts = HttpClient(url), KeptPrompts(rows, seed)
    wire = Wire(MODEL, extra={"return_token_ids": True})
    watch = RoleWatch(client)
    looking = asyncio.create_task(watch.look_on())
    try:
        told = await measure(client, url, wire, prompts, Load(rows, hang_ups(rows, 0.0)))
    finally:
        looking.cancel()
        await asyncio.wait([looking])
        client.close()
    figures = summary(told.outcomes, objectives)
    return Served(figures, prompts.answers, changes_of(watch.seen))


def told_of(way: str, one: Served, swings: int, wrong: Mapping[str, int]) -> dict[str, Any]:
    """The figures of a run that are kept."""
    figures = one.figures
    return {
        "way": way,
        "completed": figures["completed"],
        "failed": figures["failed"],
        "slo_attainment": figures["slo_attainment"],
        **{
            f"{name}_{part}": figures[f"{name}_seconds"][part]
            for name in ("ttft", "tpot")
            for part in ("mean", "p99")
        },
        "role_changes": list(one.changes),
        "changes_per_swing": len(one.changes) / swings,
        **wrong,
    }


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--instances", default="prefill=1,decode=2")
    parser.add_argument("--prompts", type=float, nargs=3, default=[2.5, 800, 8])
    parser.add_argument("--answers", type=float, nargs=3, default=[1.2, 40, 160])
    parser.add_argument("--half-seconds", type=float, default=20.0)
    parser.add_argument("--swings", type=int, default=1, help="of each server in each round")
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.1)
    parser.add_argument("--kv-memory", default="128MiB", help="of each instance")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, default=result_file.path_of("roles_served"))
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Print a table, and write the figures to the bench's result file."""
    args = arguments(given)
    flags = [f"--kv-memory={args.kv_memory}", f"--dtype={args.dtype}"]
    setting = Setting(args.instances, flags, Objectives(args.slo_ttft, args.slo_tpot))
    halves = [Half(rate, int(prompt), int(answer)) for rate, prompt, answer in both(args)]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            rows = swinging(halves * args.swings, args.half_seconds, number)
            ways = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
            runs = {way: served(way, setting, rows, number, Path(folder)) for way in ways}
            reference = runs["roles stay"].answers
            for way, one in runs.items():
                wrong = wrong_answers(one.answers, reference, rows)
                found.append({"round": number} | told_of(way, one, args.swings, wrong))
    asked = {key: value for key, value in vars(args).items() if key != "json"}
    result_file.write(args.json, {"setting": asked, "runs": found})
    shown = ["round", "way", "completed", "failed", "slo_attainment", "ttft_mean", "ttft_p99"]
    shown += ["tpot_mean", "tpot_p99", "changes_per_swing", "other_tokens", "other_length"]
    table = Table(*shown)
    for each in found:
        table.add_row(*(_text(each[name]) for name in shown))
    Console(width=180).print(table)


def both(args: argparse.Namespace) -> list[list[float]]:
    """Rate, tokens of prompt and tokens of answer of each half of a swing."""
    return [args.prompts, args.answers]


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
