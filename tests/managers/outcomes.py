"""Outcomes of cells, made up."""

from typing import Any

from bench.managers.cells import OURS, Cell
from bench.managers.verdicts import Comparison, comparisons

PLACE = ("gemma3-27b", "azure-2023-conv", 8)
MIXED, PLAIN = ("full", "sliding"), ("full",)


def ran(steps: int = 100, **more: Any) -> dict[str, Any]:
    """A cell that ran to its end."""
    figures = {
        "requests_finished": 10,
        "requests_refused": 0,
        "steps": steps,
        "batch_mean": 5.0,
        "hit_rate": 0.1,
        "short_of_memory": 0.5,
        "waste": 0.01,
        "preemptions": 0,
        "decisions": "same",
        "asked_bytes": 1 << 30,
        "sources": "0123456789ab",
    }
    return figures | more


def refused(why: str) -> dict[str, Any]:
    """A cell that its manager did not run at all."""
    return {"refused": why, "asked_bytes": 1 << 30, "sources": "0123456789ab"}


def compared(kinds: tuple[str, ...] = MIXED, **outcomes: dict[str, Any]) -> Comparison:
    """All of our managers on one place, alike but for those given; ``_`` stands for ``-``."""
    given = {name.replace("_", "-"): one for name, one in outcomes.items()}
    results = {manager: ran() for manager in OURS} | given
    cells = {Cell(*PLACE, manager): one for manager, one in results.items()}
    (found,) = comparisons(cells, {PLACE[0]: kinds})
    return found
