"""CPU time that a streamed token costs the front, and a request of one token.

A server over an instance that has no model: each of its steps reads through memory, as a pass
does, so that nothing of the front is in the caches when the next token comes.

``python -m bench.load.front --batch 1 32``, with ``--tree before=DIR`` beside the front of another
source tree, in turn.
"""

import argparse
import json
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.side_by_side.driving import drive, figures_of
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.rounds import order_of
from bench.side_by_side.scenarios import Scenario
from bench.side_by_side.systems import python_of
from kvell.cli.terminal.environment import process_cache_dir
from kvell.engine.protocol.messages import Event
from kvell.models.sources.progress import quiet
from kvell.server.run import ServeOptions, serve
from kvell.server.text.named_texts import texts_of
from kvell.serving.lone import serve_instance
from kvell.testing.instance import FakeEngine

MODEL, THIS = "smollm2", "this"
READ_BYTES = 96 << 20
CREDITS = 64
PROMPT_TOKENS = 16
LONGER = 5
"""Ratio of tokens between the two kinds of requests that are compared."""
SHORT_REQUESTS = 256
"""Requests of one token that are sent at once."""
REQUEST = f"a request, {SHORT_REQUESTS} at once"

Costs = dict[str, dict[str, list[float]]]
"""Seconds of CPU, round by round, by tree and by what they are the cost of."""


class ReadingEngine(FakeEngine):
    """A fake engine whose steps read through memory, as a forward pass does."""

    def __init__(self) -> None:
        super().__init__(credits=CREDITS)
        self._weights = np.ones(READ_BYTES // 8)

    def step(self) -> list[Event]:
        """One token for each running request."""
        self._weights.sum()
        return super().step()


def instance(socket_fd: int) -> None:
    """Serve on an inherited socket."""
    with socket.socket(fileno=socket_fd) as sock:
        serve_instance(ReadingEngine(), sock)


def server() -> None:
    """Print the address as JSON, serve until a signal."""
    command = [sys.executable, "-m", "bench.load.front", "instance", "{socket_fd}"]
    texts = texts_of((MODEL,), process_cache_dir(), quiet)
    serve(command, texts, ServeOptions(port=0), lambda url: print(json.dumps(url), flush=True))


def computed_seconds(pid: int) -> float:
    """CPU seconds of a process's first thread, which runs the event loop."""
    nanoseconds, *_ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(nanoseconds) / 1e9


def cost_seconds(url: str, pid: int, batch: int, tokens: int, turn: int) -> float:
    """Seconds per token; a request's fixed cost, and that of reading counters, is subtracted."""
    spent = []
    for length in (tokens, LONGER * tokens):
        begin = computed_seconds(pid)
        figures_of(drive(url, Scenario("front", batch, PROMPT_TOKENS, length), turn))
        spent.append(computed_seconds(pid) - begin)
    return (spent[1] - spent[0]) / ((LONGER - 1) * batch * tokens)


def request_seconds(url: str, pid: int, turn: int) -> float:
    """Seconds per request of one token; reading counters is included once for all."""
    begin = computed_seconds(pid)
    figures_of(drive(url, Scenario("front", SHORT_REQUESTS, PROMPT_TOKENS, 1), turn))
    return (computed_seconds(pid) - begin) / SHORT_REQUESTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tree", metavar="NAME=DIR", help="another source tree, with a .venv")
    options = parser.parse_args(arguments)
    trees = {THIS: (sys.executable, Path.cwd())}
    if options.tree:
        name, _, directory = options.tree.partition("=")
        trees[name] = (python_of(directory), Path(directory))
    costs = measured(trees, options.batch, options.tokens, options.rounds)
    console = Console(width=110)
    console.print(machine.describe())
    console.print(table(costs))
    if options.json is not None:
        others = {name: found for name, found in costs.items() if name != THIS}
        report = {"machine": machine.describe(), "seconds": costs[THIS], "trees": others}
        result_file.write(options.json, report)


def measured(
    trees: Mapping[str, tuple[str, Path]], batches: Sequence[int], tokens: int, rounds: int
) -> Costs:
    """Costs by tree; all servers but the measured one are paused.

    :param trees: an interpreter, and the directory that has its ``bench``.
    """
    costs: Costs = {name: defaultdict(list) for name in trees}
    with ExitStack() as ends:
        logs = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name, (python, directory) in trees.items():
            command = [python, "-m", "bench.load.front", "server"]
            log = logs / f"{name}.log"
            process = SystemProcess(command, log, {}, talks=True, directory=directory)
            ends.callback(process.end)
            servers[name] = (process, json.loads(process.hear()))
            process.pause()
        for turn in range(rounds):
            for name in order_of(turn, list(servers)):
                process, url = servers[name]
                process.resume()
                for batch in batches:
                    cost = cost_seconds(url, process.process.pid, batch, tokens, turn)
                    costs[name][f"a token of {batch} requests"].append(cost)
                costs[name][REQUEST].append(request_seconds(url, process.process.pid, turn))
                process.pause()
    return costs


def table(costs: Costs) -> Table:
    """Best and median of each cost, and the median of the rounds' ratios to the first tree."""
    made = Table("tree", "cost of", "µs: best", "median", "this over it")
    first = next(iter(costs.values()))
    for name, kinds in costs.items():
        for kind, seconds in kinds.items():
            ratios = [mine / its for mine, its in zip(first[kind], seconds, strict=True)]
            micros = (f"{of(seconds) * 1e6:.0f}" for of in (min, median))
            made.add_row(name, kind, *micros, f"{median(ratios):.3f}")
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["instance"]:
        instance(int(sys.argv[2]))
    elif sys.argv[1:2] == ["server"]:
        server()
    else:
        main()
