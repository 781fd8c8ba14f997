"""Latencies that clients of a replay would see, under the names of ``kvell bench serve``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvell.load.outcome import Outcome
from kvell.load.report import Objectives, summary

if TYPE_CHECKING:
    from kvell.simulator.replay.replay import RequestFigures
    from kvell.simulator.traces.rows import TraceRow

UNKNOWN = ("inter_token_seconds", "send_lag_seconds")
"""Figures that a replay lacks: it records only first and last tokens, and never sends late."""
REFUSED = "refused"


def outcomes(figures: "Iterable[RequestFigures]", rows: "Iterable[TraceRow]") -> list[Outcome]:
    """Return the outcome of each request that arrived; answers have the trace's lengths."""
    return [
        _outcome(one, row.output_tokens)
        for one, row in zip(figures, rows, strict=True)
        if one.came_seconds is not None
    ]


def latencies(outcomes: list[Outcome], objectives: Objectives, refused: int) -> dict[str, Any]:
    """Return seconds to the first token, per token and end to end, rates and goodput.

    :param refused: number of requests that could not be served, arrived or not.
    """
    found = summary(outcomes, objectives)
    for name in UNKNOWN:
        del found[name]
    return found | {"failed": refused, "failures": {REFUSED: refused} if refused else {}}


def _outcome(one: "RequestFigures", output_tokens: int) -> Outcome:
    came = one.came_seconds or 0.0
    if one.finish_seconds is None or one.first_token_seconds is None:
        return Outcome(one.index, came, came, came, failure=REFUSED)
    return Outcome(
        one.index,
        came,
        came,
        one.finish_seconds,
        (one.first_token_seconds, one.finish_seconds),
        one.prompt_tokens,
        output_tokens,
        one.hit_tokens,
    )
