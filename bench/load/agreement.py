"""Whether ``kvell bench serve`` reports the latencies that a server has and other tools report.

It runs against a server of known latencies, and against Kvell and vLLM's CPU server with SmolLM2.
See README.md.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.load import verdicts
from bench.load.commands import Shape
from bench.load.environments import guidellm_python
from bench.load.fixed_server import MODEL, Latencies
from bench.load.reports import Figures
from bench.load.tools import Kvell, OtherTool, Tool, whole_run
from bench.load.verdicts import Verdict
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.systems import kvell_server, vllm_server
from bench.side_by_side.vllm_environment import exported, vllm_python
from kvell.cli.terminal.environment import process_cache_dir
from kvell.errors import KvellError
from kvell.models.sources.source import resolve_model

SERVERS = ("fixed", "kvell", "vllm")
OTHERS = ("vllm", "guidellm")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    cache = process_cache_dir()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="+", default=SERVERS, choices=SERVERS)
    parser.add_argument("--tools", nargs="*", default=OTHERS, choices=OTHERS)
    parser.add_argument("--vllm-env", type=Path, default=cache / "vllm-env")
    parser.add_argument("--vllm-flags", default="", help="such as '--enforce-eager'")
    parser.add_argument("--guidellm-env", type=Path, default=cache / "guidellm-env")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--ttft", type=float, default=0.5, help="of the fixed server, seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="of the fixed server, seconds")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


class Bench:
    """Servers and tools, made from the command line."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options, self._directory = options, directory
        self.shape = Shape(
            options.requests, options.rate, options.prompt_tokens, options.max_tokens
        )
        self.latencies = Latencies(options.ttft, options.tpot)
        cache = process_cache_dir()
        self._weights = exported(resolve_model("smollm2", cache), cache / "smollm2-bfloat16")

    def tools(self) -> dict[str, Tool]:
        """All tools, ours first."""
        options, there = self._options, self._directory
        found: dict[str, Tool] = {verdicts.OURS: Kvell(there)}
        if "vllm" in options.tools:
            found["vllm"] = OtherTool("vllm", vllm_python(options.vllm_env), self._weights, there)
        if "guidellm" in options.tools:
            python = guidellm_python(options.guidellm_env)
            found["guidellm"] = OtherTool("guidellm", python, self._weights, there)
        return found

    @contextmanager
    def server(self, name: str) -> Iterator[tuple[str, str]]:
        """Address and model of a running server."""
        log = self._directory / f"{name}.log"
        if name == "fixed":
            process, url, model = *self._fixed(log), MODEL
        elif name == "kvell":
            system = kvell_server("smollm2", log, ["--kv-memory", "512MiB"])
            process, url, model = system.process, system.base_url, "smollm2"
        else:
            flags = shlex.split(self._options.vllm_flags)
            python = vllm_python(self._options.vllm_env)
            system = vllm_server(python, str(self._weights), log, flags)
            process, url, model = system.process, system.base_url, self._weights.name
        try:
            yield url, model
        finally:
            process.end()

    def _fixed(self, log: Path) -> tuple[SystemProcess, str]:
        command = [sys.executable, "-m", "bench.load.fixed_server"]
        command += ["--ttft", str(self.latencies.ttft_seconds)]
        command += ["--tpot", str(self.latencies.tpot_seconds)]
        process = SystemProcess(command, log, {}, talks=True)
        return process, process.hear().strip()


def in_turn(
    bench: Bench, tools: Mapping[str, Tool], url: str, model: str, rounds: int, console: Console
) -> dict[str, list[Figures]]:
    """Run all tools on one server, round by round; a first run warms up."""
    for tool in tools.values():
        whole_run(tool, url, model, bench.shape, 999, console.print)
    runs: dict[str, list[Figures]] = {name: [] for name in tools}
    for number in range(rounds):
        for place, (name, tool) in enumerate(tools.items()):
            console.print(f"round {number + 1}: {name} on {model}")
            # Other prompts in every run, or the second tool would find them cached.
            seed = 1 + number * len(tools) + place
            runs[name].append(whole_run(tool, url, model, bench.shape, seed, console.print))
    return runs


def measured(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every tool on every server; the file is written after each server."""
    servers = _known_servers(options.json)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options, Path(directory))
        tools = bench.tools()
        for name in options.servers:
            with bench.server(name) as (url, model):
                runs = in_turn(bench, tools, url, model, options.rounds, console)
            servers[name] = {
                "machine": machine.describe(),
                "shape": asdict(bench.shape),
                "known": asdict(bench.latencies) if name == "fixed" else None,
                "rounds": options.rounds,
                "runs": runs,
                "verdicts": [one.as_json() for one in judged(bench, name, runs)],
            }
            if options.json:
                result_file.write(options.json, {"servers": servers})
    return {"servers": {name: servers[name] for name in options.servers}}


def _known_servers(path: Path | None) -> dict[str, Any]:
    """Servers of earlier runs, which stay: each is compared with itself only."""
    if path is None or not path.exists():
        return {}
    known: dict[str, Any] = json.loads(path.read_text())["servers"]
    return known


def judged(bench: Bench, server: str, runs: verdicts.Runs) -> list[Verdict]:
    """Verdicts: against known latencies where there are any, else against the other tools."""
    if server == "fixed":
        return verdicts.against_known(runs, verdicts.known(bench.latencies, bench.shape))
    return verdicts.against_others(runs)


def show(console: Console, found: dict[str, Any]) -> bool:
    """Print a table; return whether our tool agrees everywhere."""
    table = Table(title="load tools: medians of the runs' means")
    for column in verdicts.COLUMNS:
        table.add_column(column, justify="right" if column.endswith("ms") else "left")
    rows = [(name, one) for name, server in found["servers"].items() for one in server["verdicts"]]
    for server, one in rows:
        table.add_row(
            server,
            one["tool"],
            one["figure"].removesuffix("_seconds"),
            one["against"],
            f"{one['found'] * 1000:,.1f}",
            f"{one['reference'] * 1000:,.1f}",
            f"{one['difference']:.1%}",
            f"{one['allowed']:.1%}",
            "agrees" if one["agrees"] else "differs",
        )
    console.print(table)
    return all(one["agrees"] for _, one in rows if one["tool"] == verdicts.OURS)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 if our tool differs."""
    options = arguments(given)
    try:
        found = measured(options, Console(stderr=True))
    except KvellError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if show(Console(width=120), found) else 1


if __name__ == "__main__":
    sys.exit(main())
