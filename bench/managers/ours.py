"""One cell with a manager of Kvell's."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from bench.replay.shapes import Shape
from kvell.cli.replay.command import replay_limits
from kvell.clock import MonotonicClock
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.errors import ChangeSomething
from kvell.memory import Layout, Manager, MemoryCore, create_core, plan_layout
from kvell.simulator.replay.replay import Replay, RequestFigures
from kvell.simulator.replay.runner import StepTimer
from kvell.simulator.report.timeline import Timeline
from kvell.simulator.traces.rows import TraceRow

KEPT = (
    "requests_finished",
    "requests_refused",
    "steps",
    "batch_mean",
    "batch_saturated_mean",
    "hit_rate",
    "waste",
    "stranded",
    "short_of_memory",
    "preemptions",
    "manager_us_per_step",
    "manager_us_per_request_step",
    "wall_seconds",
)
"""Figures that a cell keeps of a replay's report."""
LOOK_EVERY = 16
"""Steps of a cell between two samples of its pages: sampling is slow."""


class EqualSteps:
    """Steps that take a second each: where all requests wait at the start, time decides nothing."""

    request_seconds = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        """One second, whatever the plan."""
        return 1.0


def replayed(
    shape: Shape,
    rows: Sequence[TraceRow],
    memory_bytes: int,
    manager: Manager,
    *,
    core_of: Callable[[Layout], MemoryCore] = create_core,
    limits_of: Callable[[Layout, int], Limits] = replay_limits,
    machine: StepTimer | None = None,
    timeline: Timeline | None = None,
    look_every: int = 1,
    progress: Callable[[float], None] = lambda _: None,
) -> Replay:
    """Replay rows that all wait at the start, without sessions, as vLLM's side does.

    Requests may exceed the model's context: some traces have one, and vLLM's side serves it.

    :param limits_of: from pages and the longest request.
    :param machine: times steps; by default each takes a second.
    :param look_every: steps between two samples of the pages.
    :raises ChangeSomething: if the memory holds no request of the shape under this manager.
    """
    layers = shape.description.layers
    layout = plan_layout(layers, memory_bytes, manager=manager)
    longest = max(row.num_tokens for row in rows)
    run = Replay(
        core_of(layout),
        layers,
        limits_of(layout, max(longest, shape.description.max_model_len)),
        rows,
        "start",
        machine or EqualSteps(),
        MonotonicClock(),
        timeline=timeline,
        sessions=False,
        images_in_text=shape.images_in_text,
        look_every=look_every,
    )
    run.run(progress)
    return run


def outcome(
    shape: Shape,
    rows: Sequence[TraceRow],
    memory_bytes: int,
    manager: Manager,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """The figures of one cell, or ``{"refused": reason}``."""
    try:
        run = replayed(shape, rows, memory_bytes, manager, look_every=LOOK_EVERY, progress=progress)
    except ChangeSomething as error:
        return {"refused": str(error)}
    report = run.report()
    figures = {name: report[name] for name in KEPT}
    return figures | {"kv_memory_bytes": memory_bytes, "decisions": digest(run.requests)}


def digest(requests: Sequence[RequestFigures]) -> str:
    """A digest that is equal for runs with the same hits and the same steps of every request."""
    told = json.dumps([astuple(figures) for figures in requests])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
