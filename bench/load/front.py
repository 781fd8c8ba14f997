"""CPU time that a streamed token costs the front.

A server over an instance that has no model: each of its steps reads through memory, as a pass
does, so that nothing of the front is in the caches when the next token comes.

``python -m bench.load.front --batch 1 32``
"""

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.side_by_side.driving import drive, figures_of
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.scenarios import Scenario
from kvell.cli.terminal.environment import process_cache_dir
from kvell.engine.protocol.messages import Event
from kvell.models.sources.progress import quiet
from kvell.server.run import ServeOptions, serve
from kvell.server.text.named_texts import texts_of
from kvell.serving.lone import serve_instance
from kvell.testing.instance import FakeEngine

MODEL = "smollm2"
READ_BYTES = 96 << 20
CREDITS = 64
PROMPT_TOKENS = 16
LONGER = 5
"""Ratio of tokens between the two kinds of requests that are compared."""


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "bench.load.front", "server"]
        process = SystemProcess(command, Path(directory, "log"), {}, talks=True)
        try:
            url = json.loads(process.hear())
            costs = {
                batch: [
                    cost_seconds(url, process.process.pid, batch, options.tokens, turn)
                    for turn in range(options.rounds)
                ]
                for batch in options.batch
            }
        finally:
            process.end()
    table = Table("requests at once", "µs of a token: best", "median")
    for batch, seconds in costs.items():
        table.add_row(str(batch), f"{min(seconds) * 1e6:.0f}", f"{median(seconds) * 1e6:.0f}")
    console = Console(width=110)
    console.print(machine.describe())
    console.print(table)
    if options.json is not None:
        report = {"machine": machine.describe(), "seconds": costs}
        result_file.write(options.json, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["instance"]:
        instance(int(sys.argv[2]))
    elif sys.argv[1:2] == ["server"]:
        server()
    else:
        main()
