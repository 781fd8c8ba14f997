"""Reports of load tools and pages of ``/metrics``, as they were in one run of each tool."""

import json
from pathlib import Path
from typing import Any, get_args

from bench.load.commands import OtherName, Route, Shape
from bench.load.reports import Told
from bench.load.server_metrics import Totals, totals

RECORDED = Path("tests/data/load_tools")
"""Of one run of each tool on chat: four requests of 62 tokens with their template, 8 tokens out;
the report without most of its figures, and ``/metrics`` before and after."""
SHAPE = Shape(requests=4, rate=2.0, prompt_tokens=32, output_tokens=8)
NAMES: tuple[OtherName, ...] = get_args(OtherName)
ROUTES: tuple[Route, ...] = get_args(Route)


def recorded(name: str) -> dict[str, Any]:
    """A tool's report."""
    report: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return report


def page_text(name: str, when: str) -> str:
    """The server's page ``before`` or ``after`` a tool's run."""
    return (RECORDED / f"{name}_{when}.txt").read_text()


def page(name: str, when: str) -> Totals:
    """Totals of that page."""
    return totals(page_text(name, when))


def told(requests: int = 4, output_tokens: int | None = 32, **figures: float) -> Told:
    """What one side might say."""
    usual = {"ttft_seconds": 0.1, "tpot_seconds": 0.02, "e2e_seconds": 0.24}
    return Told(requests, 248, output_tokens, usual | figures)
