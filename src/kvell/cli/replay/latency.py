"""Latencies that clients of a replay would see, under the names of ``kvell bench serve``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvell.load.outcome import Outcome
from kvell.load.report import Objectives, summary

if TYPE_CHECKING:
    from kvell.simulator.replay.request_figures import RequestFigures
    from kvell.simulator.traces.rows import TraceRow

UNKNOWN = ("inter_token_seconds", "send_lag_seconds")
"""The figures that a replay lacks: it records only first and last tokens, and never sends late."""
REFUSED = "refused"


def outcomes(figures: "Iterable[RequestFigures]", rows: "Iterable[TraceRow]") -> list[Outcome]:
    """Return the outcome of each request that arrived; answers have the lengths of the trace."""
    return [
        _outcome(request, row.output_tokens)
        for request, row in zip(figures, rows, strict=True)
        if request.came_seconds is not None
    ]


def latencies(outcomes: list[Outcome], objectives: Objectives, refused: int) -> dict[str, Any]:
    """Return seconds to the first token, per token and end to end, rates and goodput.

    :param refused: number of requests that could not be served, including those that never arrived.
    """
    figures = summary(outcomes, objectives)
    for name in UNKNOWN:
        del figures[name]
    return figures | {"failed": refused, "failures": {REFUSED: refused} if refused else {}}


def _outcome(request: "RequestFigures", output_tokens: int) -> Outcome:
    came = request.came_seconds or 0.0
    if request.finish_seconds is None or request.first_token_seconds is None:
        return Outcome(request.index, came, came, came, failure=REFUSED)
    return Outcome(
        request.index,
        came,
        came,
        request.finish_seconds,
        (request.first_token_seconds, request.finish_seconds),
        request.prompt_tokens,
        output_tokens,
        request.hit_tokens,
    )
