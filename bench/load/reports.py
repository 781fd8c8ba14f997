"""What load tools report, read in one form.  Pure."""

from collections.abc import Mapping
from typing import Any

from bench.load.commands import Shape
from kvell.errors import KvellError

Figures = dict[str, float]
"""``ttft_seconds``, ``tpot_seconds`` and ``e2e_seconds``: means over the requests of a run."""


class ToolFailed(KvellError):  # noqa: N818 - it says what happened
    """A tool ended with an error, or some of its requests did."""


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
    means = {
        name: float(metrics[name]["successful"]["mean"])
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    }
    return {
        "ttft_seconds": means["time_to_first_token_ms"] / 1000,
        "tpot_seconds": means["inter_token_latency_ms"] / 1000,
        "e2e_seconds": means["request_latency"],
    }


def _require_all(completed: int, shape: Shape) -> None:
    if completed != shape.requests:
        raise ToolFailed(f"{completed} of {shape.requests} requests have an answer")
