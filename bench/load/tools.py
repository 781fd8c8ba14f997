"""Load tools as processes: ``kvell bench serve`` and those that others wrote, on the same load.

Each sends requests of one shape, at a constant rate or so many at once, and reports its own
means.  Other tools define some figures differently; see README.md.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.load.commands import (
    Asked,
    OtherName,
    Shape,
    guidellm_words,
    vllm_words,
)
from bench.load.reports import (
    Figures,
    ToolFailed,
    of_guidellm,
    of_kvell,
    of_vllm,
)
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import write_trace

TIMEOUT_SECONDS = 1200.0
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What ``vllm bench serve`` runs; the command itself looks for a package called ``vllm``, and the
CPU build's name is another."""
OFFLINE = "HF_HUB_OFFLINE"


class Tool(Protocol):
    """A load tool that drives a server."""

    def run(self, base_url: str, model: str, shape: Shape, seed: int) -> Figures:
        """One run; another seed sends other prompts.

        :raises ToolFailed: if not every request has its answer.
        """
        ...


ATTEMPTS = 3
"""Attempts per run: GuideLLM now and then loses its last request, and the run is repeated."""


def whole_run(
    tool: Tool, base_url: str, model: str, shape: Shape, seed: int, told: Callable[[str], None]
) -> Figures:
    """Repeat a tool's run until every request has its answer.

    :param seed: of the first attempt; retries take seeds that no first attempt has.
    :param told: called with each failed attempt.
    :raises ToolFailed: if all :data:`ATTEMPTS` fail.
    """
    for attempt in range(ATTEMPTS - 1):
        try:
            return tool.run(base_url, model, shape, seed + 10_000 * attempt)
        except ToolFailed as failure:
            told(f"again: {failure}")
    return tool.run(base_url, model, shape, seed + 10_000 * (ATTEMPTS - 1))


@dataclass(frozen=True)
class Kvell:
    """``kvell bench serve``, as users call it."""

    directory: Path

    def run(self, base_url: str, model: str, shape: Shape, seed: int) -> Figures:
        """Run the tool once; see :class:`Tool`."""
        trace = self.directory / "trace.jsonl"
        write_trace(trace, even_rows(shape))
        command = [sys.executable, "-m", "kvell.cli.main", "bench", "serve", "--json", "-"]
        command += ["--base-url", base_url, "--model", model, "--trace", str(trace)]
        return of_kvell(json.loads(_said([*command, "--seed", str(seed)])), shape)


@dataclass(frozen=True)
class _Kind:
    """How a tool is called and read.

    :param program: what comes before its words, of an environment's interpreter.
    :param report: where it writes, below a directory.
    """

    program: Callable[[Path], list[str]]
    words: Callable[[Asked], list[str]]
    report: str
    read: Callable[[Mapping[str, Any], Shape], Figures]


KINDS: dict[OtherName, _Kind] = {
    "guidellm": _Kind(
        lambda python: [str(python.with_name("guidellm"))],
        guidellm_words,
        "guidellm.json",
        of_guidellm,
    ),
    "vllm": _Kind(
        lambda python: [str(python), "-c", VLLM_BENCH],
        vllm_words,
        "vllm_bench.json",
        of_vllm,
    ),
}


@dataclass(frozen=True)
class OtherTool:
    """A tool that others wrote, as it is.

    :param python: of an environment that has it.
    :param tokenizer: a directory; it makes the prompts.
    """

    name: OtherName
    python: Path
    tokenizer: Path
    directory: Path

    def run(self, base_url: str, model: str, shape: Shape, seed: int) -> Figures:
        """Run the tool once, on completions; see :class:`Tool`."""
        kind = KINDS[self.name]
        report = self.directory / kind.report
        report.unlink(missing_ok=True)
        asked = Asked(base_url, model, self.tokenizer, shape, seed, report)
        _said([*kind.program(self.python), *kind.words(asked)])
        if not report.exists():
            raise ToolFailed(f"{self.name} ended well and wrote no report")
        return kind.read(json.loads(report.read_text()), shape)


def even_rows(shape: Shape) -> list[TraceRow]:
    """The requests as a trace."""
    return [
        TraceRow(index / shape.rate, shape.prompt_tokens, shape.output_tokens)
        for index in range(shape.requests)
    ]


def _said(command: Sequence[str]) -> str:
    """Run a tool; return its stdout."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | {OFFLINE: "1"},
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-15:]
        raise ToolFailed("\n".join([f"{command[0]} ended with {done.returncode}", *lines]))
    return done.stdout
