from typing import Any

from bench.managers.cells import DIVISIONS
from bench.managers.verdicts import Comparison

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
    }
    return figures | more


def compared(kinds: tuple[str, ...] = MIXED, **outcomes: dict[str, Any]) -> Comparison:
    """All divisions of memory in one case, alike but for those given; ``_`` stands for ``-``."""
    given = {name.replace("_", "-"): outcome for name, outcome in outcomes.items()}
    return Comparison("gemma3-27b", kinds, {name: ran() for name in DIVISIONS} | given)
