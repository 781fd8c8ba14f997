"""What load tools report, read in one form.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.load.commands import Shape
from kvell.errors import KvellError

Figures = dict[str, float]
"""``ttft_seconds``, ``tpot_seconds`` and ``e2e_seconds``: means over the requests of a run."""


class ToolFailed(KvellError):  # noqa: N818 - it says what happened
    """A tool ended with an error, or some of its requests did."""


@dataclass(frozen=True)
class Told:
    """What one side says of a run.

    :param prompt_tokens: of all requests; None where a tool does not say what the server counted.
    :param output_tokens: the same.
    """

    requests: int
    prompt_tokens: int | None
    output_tokens: int | None
    figures: Figures

    def counts(self) -> dict[str, int | None]:
        """Counts by name."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }


def of_kvell(report: Mapping[str, Any], shape: Shape) -> Figures:
    """Figures of ``kvell bench serve --json``."""
    _require_all(report["completed"], shape)
    return {name: report[name]["mean"] for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds")}


def of_vllm(report: Mapping[str, Any], shape: Shape) -> Told:
    """What ``vllm bench serve --save-result`` says."""
    _require_all(report["completed"], shape)
    names = {"ttft_seconds": "ttft", "tpot_seconds": "tpot", "e2e_seconds": "e2el"}
    return Told(
        report["completed"],
        report["total_input_tokens"],
        report["total_output_tokens"],
        {ours: report[f"mean_{theirs}_ms"] / 1000 for ours, theirs in names.items()},
    )


def of_guidellm(report: Mapping[str, Any], shape: Shape) -> Told:
    """What GuideLLM says: its inter-token latency, since its TPOT includes the first token."""
    metrics = report["benchmarks"][0]["metrics"]
    completed = metrics["request_totals"]["successful"]
    _require_all(completed, shape)

    def answered(name: str, what: str = "mean") -> float:
        return float(metrics[name]["successful"][what])

    return Told(
        completed,
        round(answered("prompt_token_count", "total_sum")),
        round(answered("output_token_count", "total_sum")),
        {
            "ttft_seconds": answered("time_to_first_token_ms") / 1000,
            "tpot_seconds": answered("inter_token_latency_ms") / 1000,
            "e2e_seconds": answered("request_latency"),
        },
    )


def of_aiperf(report: Mapping[str, Any], shape: Shape) -> Told:
    """What AIPerf says; the server's counts of tokens, never its own over the text."""
    _require_all(round(report["request_count"]["avg"]), shape)

    def used(name: str) -> int | None:
        total = report.get(f"total_usage_{name}_tokens")
        return None if total is None else round(total["avg"])

    names = {
        "ttft_seconds": "time_to_first_token",
        "tpot_seconds": "inter_token_latency",
        "e2e_seconds": "request_latency",
    }
    return Told(
        shape.requests,
        used("prompt"),
        used("completion"),
        {ours: report[theirs]["avg"] / 1000 for ours, theirs in names.items()},
    )


def _require_all(completed: int, shape: Shape) -> None:
    if completed != shape.requests:
        raise ToolFailed(f"{completed} of {shape.requests} requests have an answer")
