"""Verdicts on whether load tools agree.  Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.load.commands import Shape
from bench.load.fixed_server import Latencies
from bench.load.reports import Figures

KNOWN_TOLERANCE = 0.03
"""Tolerance against the known latencies of a server."""
SPREADS = 2.0
"""Repeat spreads by which two tools may differ on a server of unknown latencies."""
OURS = "kvell"
COLUMNS = (
    "server",
    "tool",
    "figure",
    "against",
    "found ms",
    "reference ms",
    "difference",
    "allowed",
    "",
)
"""Columns of a table of verdicts, in the order of their fields."""

Runs = Mapping[str, Sequence[Figures]]
"""Tool to its runs on one server."""


@dataclass(frozen=True)
class Verdict:
    """One figure of a tool against a reference.

    :param tool: whose figure is judged; only ours counts, others show how hard the task is.
    :param found: median of a tool's runs, seconds; or a count.
    :param reference: median of the other tool, the known value or the server's.
    :param difference: |found − reference| / reference.
    :param allowed: largest difference allowed.
    """

    tool: str
    figure: str
    against: str
    found: float
    reference: float
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is allowed."""
        return self.difference <= self.allowed

    def as_json(self) -> dict[str, object]:
        """Its fields and whether it agrees."""
        return {**asdict(self), "agrees": self.agrees}


def known(latencies: Latencies, shape: Shape) -> Figures:
    """Figures that a tool must find at the fixed server."""
    return {
        "ttft_seconds": latencies.ttft_seconds,
        "tpot_seconds": latencies.tpot_seconds,
        "e2e_seconds": latencies.e2e_seconds(shape.output_tokens),
    }


def against_known(runs: Runs, truth: Figures) -> list[Verdict]:
    """Judge our tool and each other tool against the server's known latencies."""
    return [
        _verdict(tool, figure, "known", _median(found, figure), value, KNOWN_TOLERANCE)
        for tool, found in runs.items()
        for figure, value in truth.items()
    ]


def against_others(runs: Runs) -> list[Verdict]:
    """Judge our tool against each other one, within twice the larger repeat spread of the two."""
    ours, verdicts = runs[OURS], list[Verdict]()
    for tool, theirs in runs.items():
        for figure in ours[0] if tool != OURS else ():
            allowed = SPREADS * max(spread(ours, figure), spread(theirs, figure))
            pair = _median(ours, figure), _median(theirs, figure)
            verdicts.append(_verdict(OURS, figure, tool, *pair, allowed))
    return verdicts


def spread(runs: Sequence[Figures], figure: str) -> float:
    """(largest − smallest) / median of one tool's runs."""
    values = [run[figure] for run in runs]
    return (max(values) - min(values)) / statistics.median(values)


def _median(runs: Sequence[Figures], figure: str) -> float:
    return statistics.median(run[figure] for run in runs)


def _verdict(
    tool: str, figure: str, against: str, found: float, reference: float, allowed: float
) -> Verdict:
    difference = abs(found - reference) / reference if reference else float(found != reference)
    return Verdict(tool, figure, against, found, reference, difference, allowed)
