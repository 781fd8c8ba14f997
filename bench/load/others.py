"""Whether a load tool that others wrote runs unchanged against Kvell, and counts what it counts.

``python -m bench.load.others --tool guidellm --tool-env DIR`` starts ``kvell serve`` with SmolLM2
and runs the tool on each route, at a fixed rate and with so many requests at once.  What the tool
reports is compared with the server's ``/metrics``.  See README.md.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast, get_args

import httpx
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.load.commands import PATHS, OtherName, Route, Shape
from bench.load.environments import tool_python
from bench.load.reports import Told, ToolFailed
from bench.load.server_metrics import Totals, told_between, totals
from bench.load.tools import ATTEMPTS, OtherTool
from bench.load.verdicts import Verdict, against_server
from bench.side_by_side.systems import kvell_server
from kvell.cli.terminal.environment import process_cache_dir
from kvell.errors import KvellError
from kvell.models.sources.source import resolve_model

MODEL = "smollm2"
RESULTS = result_file.path_of("load_tools")
COLUMNS = ("route", "load", "figure", "tool", "/metrics", "difference", "allowed", "")


class TellingTool(Protocol):
    """A tool that tells what it counted."""

    def told(self, base_url: str, model: str, route: Route, shape: Shape, seed: int) -> Told:
        """Run it once; see :class:`bench.load.tools.OtherTool`."""
        ...


@dataclass(frozen=True)
class Cell:
    """One route under one load.

    :param lost: what was wrong with attempts before this one.
    """

    route: Route
    shape: Shape
    tool: Told
    server: Told
    verdicts: list[Verdict]
    lost: list[str]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "verdicts": [one.as_json() for one in self.verdicts]}


@dataclass(frozen=True)
class Server:
    """A running server.

    :param scrape: reads its ``/metrics``.
    """

    base_url: str
    scrape: Callable[[], Totals]


def measured_cell(
    server: Server, name: OtherName, tool: TellingTool, route: Route, shape: Shape, seed: int
) -> Cell:
    """Run a tool once on one route; again, with other prompts, if it lost a request.

    :raises ToolFailed: if it loses one in each of :data:`ATTEMPTS`.
    """
    lost: list[str] = []
    while True:
        before = server.scrape()
        try:
            told = tool.told(server.base_url, MODEL, route, shape, seed + 10_000 * len(lost))
        except ToolFailed as failure:
            lost.append(str(failure))
            if len(lost) == ATTEMPTS:
                raise
            continue
        counted = told_between(before, server.scrape())
        return Cell(route, shape, told, counted, against_server(name, told, counted), lost)


def measured(
    server: Server,
    name: OtherName,
    tool: TellingTool,
    routes: Sequence[Route],
    shapes: Sequence[Shape],
    say: Callable[[str], None],
) -> list[Cell]:
    """Run a tool on every route under every load; no two runs have the same prompts."""
    cells: list[Cell] = []
    for route in routes:
        for shape in shapes:
            say(f"{name}: {PATHS[route]}, {shape.requests} requests, {shape.pace}")
            seed = 1 + len(cells)
            cells.append(measured_cell(server, name, tool, route, shape, seed))
    return cells


def served(options: argparse.Namespace, console: Console) -> tuple[str, list[Cell]]:
    """Start the server and run the tool on it; its version, and the cells."""
    python = tool_python(options.tool, options.tool_env)
    tokenizer = resolve_model(MODEL, process_cache_dir())
    lengths = options.prompt_tokens, options.max_tokens
    shapes = [
        Shape(options.requests, options.rate, *lengths),
        Shape(options.requests, options.rate, *lengths, streams=options.streams),
    ]
    with tempfile.TemporaryDirectory() as directory:
        tool = OtherTool(options.tool, python, tokenizer, Path(directory))
        version = tool.version()
        system = kvell_server(MODEL, Path(directory, "server.log"), ["--kv-memory", "512MiB"])
        try:
            url = system.base_url
            server = Server(url, lambda: totals(httpx.get(f"{url}/metrics", timeout=30).text))
            routes = options.routes
            cells = measured(server, options.tool, tool, routes, shapes, console.print)
        finally:
            system.process.end()
    return version, cells


def write(path: Path, name: OtherName, version: str, cells: Sequence[Cell]) -> None:
    """Put a tool's cells into the file; those of other tools stay as they are."""
    known = json.loads(path.read_text())["tools"] if path.exists() else {}
    known[name] = {
        "version": version,
        "run": result_file.run(),
        "machine": machine.describe(),
        "cells": [cell.as_json() for cell in cells],
    }
    result_file.write(path, {"tools": known})


def show(console: Console, version: str, cells: Sequence[Cell]) -> bool:
    """Print a table; return whether everything agrees."""
    table = Table(title=f"{version}, unchanged, beside the server's own figures")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[3:7] else "left")
    for cell in cells:
        for one in cell.verdicts:
            table.add_row(
                cell.route,
                cell.shape.pace,
                one.figure.removesuffix("_seconds"),
                shown(one.figure, one.found),
                shown(one.figure, one.reference),
                f"{one.difference:.1%}",
                f"{one.allowed:.1%}",
                "agrees" if one.agrees else "differs",
            )
    console.print(table)
    return all(one.agrees for cell in cells for one in cell.verdicts)


def shown(figure: str, value: float) -> str:
    """Seconds as milliseconds; counts as they are."""
    return f"{value * 1000:,.1f} ms" if figure.endswith("_seconds") else f"{value:,.0f}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", required=True, choices=get_args(OtherName))
    parser.add_argument("--tool-env", type=Path, help="made if there is none")
    parser.add_argument("--routes", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--requests", type=int, default=20, help="of each route and load")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--streams", type=int, default=4, help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    if options.tool_env is None:
        options.tool_env = process_cache_dir() / f"{options.tool}-env"
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 if a figure differs."""
    options = arguments(given)
    try:
        version, cells = served(options, Console(stderr=True))
    except KvellError as error:
        print(error, file=sys.stderr)
        return 2
    write(options.json, cast(OtherName, options.tool), version, cells)
    return 0 if show(Console(width=120), version, cells) else 1


if __name__ == "__main__":
    sys.exit(main())
