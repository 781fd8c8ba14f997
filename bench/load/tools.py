"""Load tools as processes: ``kvell bench serve`` and two that others wrote, given the same load.

Each sends requests of one shape at a constant rate, without waiting for answers, and reports its
own means.  Other tools define some figures differently; see README.md.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvell.errors import ChangeSomething, KvellError
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import write_trace

Figures = dict[str, float]
"""``ttft_seconds``, ``tpot_seconds`` and ``e2e_seconds``: means over the requests of a run."""
TIMEOUT_SECONDS = 1200.0
GUIDELLM = "guidellm==0.8.1"
TORCH = "torch==2.13.0"
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class ToolFailed(KvellError):  # noqa: N818 - it says what happened
    """A tool ended with an error, or some of its requests did."""


@dataclass(frozen=True)
class Shape:
    """The load: ``rate`` requests a second, evenly spaced."""

    requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int


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
        report = json.loads(_said(command, {"--seed": seed}))
        return of_kvell(report, shape)


@dataclass(frozen=True)
class VllmBench:
    """``vllm bench serve``.

    :param python: of an environment that has vLLM.
    :param tokenizer: a directory; it makes the prompts.
    """

    python: Path
    tokenizer: Path
    directory: Path

    def run(self, base_url: str, model: str, shape: Shape, seed: int) -> Figures:
        """Run the tool once; see :class:`Tool`."""
        found = self.directory / "vllm_bench.json"
        options = {
            "--backend": "openai",
            "--base-url": base_url,
            "--endpoint": "/v1/completions",
            "--model": model,
            "--tokenizer": self.tokenizer,
            "--dataset-name": "random",
            "--random-input-len": shape.prompt_tokens,
            "--random-output-len": shape.output_tokens,
            "--num-prompts": shape.requests,
            "--request-rate": shape.rate,
            "--burstiness": 1e6,  # of gamma-distributed gaps: all but constant
            "--seed": seed,
            "--percentile-metrics": "ttft,tpot,itl,e2el",
            "--result-dir": self.directory,
            "--result-filename": found.name,
        }
        flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
        _said([str(self.python), "-c", VLLM_BENCH, *flags], options)
        return of_vllm(json.loads(found.read_text()), shape)


@dataclass(frozen=True)
class GuideLlm:
    """GuideLLM.

    :param python: of an environment that has it.
    :param tokenizer: a directory; it makes the prompts.
    """

    python: Path
    tokenizer: Path
    directory: Path

    def run(self, base_url: str, model: str, shape: Shape, seed: int) -> Figures:
        """Run the tool once; see :class:`Tool`."""
        found = self.directory / "guidellm.json"
        lengths = f"prompt_tokens={shape.prompt_tokens},output_tokens={shape.output_tokens}"
        backend = f"kind=openai_http,target={base_url},model={model}"
        options = {
            "--backend": f"{backend},request_format=/v1/completions",
            "--profile": f"kind=constant,rate={shape.rate:g}",
            "--constraint": f"kind=max_requests,count={shape.requests}",
            "--tokenizer": f"kind=hf_auto,model={self.tokenizer}",
            "--data": f"kind=synthetic_text,{lengths}",
            "--seed": f"kind=static,value={seed}",
            "--output": f"kind=json,path={found}",
        }
        command = [str(self.python.with_name("guidellm")), "run", "--disable-console"]
        _said(command, options)
        return of_guidellm(json.loads(found.read_text()), shape)


def even_rows(shape: Shape) -> list[TraceRow]:
    """The requests as a trace."""
    return [
        TraceRow(index / shape.rate, shape.prompt_tokens, shape.output_tokens)
        for index in range(shape.requests)
    ]


def of_kvell(report: Mapping[str, Any], shape: Shape) -> Figures:
    """Figures of ``kvell bench serve --json``."""
    _require_all(report["completed"], shape)
    return {name: report[name]["mean"] for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds")}


def of_vllm(report: Mapping[str, Any], shape: Shape) -> Figures:
    """Figures of ``vllm bench serve --save-result``."""
    _require_all(report["completed"], shape)
    names = {"ttft_seconds": "ttft", "tpot_seconds": "tpot", "e2e_seconds": "e2el"}
    return {ours: report[f"mean_{theirs}_ms"] / 1000 for ours, theirs in names.items()}


def of_guidellm(report: Mapping[str, Any], shape: Shape) -> Figures:
    """Figures of GuideLLM: its inter-token latency, since its TPOT includes the first token."""
    metrics = report["benchmarks"][0]["metrics"]
    _require_all(metrics["request_totals"]["successful"], shape)
    return {
        "ttft_seconds": _mean(metrics, "time_to_first_token_ms") / 1000,
        "tpot_seconds": _mean(metrics, "inter_token_latency_ms") / 1000,
        "e2e_seconds": _mean(metrics, "request_latency"),
    }


def guidellm_python(directory: Path) -> Path:
    """The interpreter of an environment that has GuideLLM; made if there is none (1.5 GB).

    :raises ChangeSomething: if it cannot be installed.
    """
    python = directory / "bin" / "python"
    if python.with_name("guidellm").exists():
        return python
    remedy = "leave guidellm out of --tools"
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), "-m", "pip", "install", "-q", TORCH, GUIDELLM],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ChangeSomething("--guidellm-env", str(directory), f"no tool: {last}", remedy)
    return python


def _mean(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics[name]["successful"]["mean"])


def _require_all(completed: int, shape: Shape) -> None:
    if completed != shape.requests:
        raise ToolFailed(f"{completed} of {shape.requests} requests have an answer")


def _said(command: Sequence[str], options: Mapping[str, object]) -> str:
    """Run a tool; return its stdout."""
    words = [word for name, value in options.items() for word in (name, str(value))]
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-15:]
        raise ToolFailed("\n".join([f"{command[0]} ended with {done.returncode}", *lines]))
    return done.stdout
