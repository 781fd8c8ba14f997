"""One cell with a manager of Kvell's."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from bench.replay.shapes import ELEMENT_BYTES, Shape
from kvell.cli.replay import replay_limits
from kvell.clock import MonotonicClock
from kvell.engine.limits import Limits
from kvell.errors import ChangeSomething
from kvell.memory import Layout, Manager, MemoryCore, create_core, plan_layout
from kvell.simulator.model_cost import model_cost
from kvell.simulator.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay import Replay, RequestFigures
from kvell.simulator.rows import TraceRow
from kvell.simulator.runner import Machine
from kvell.simulator.timeline import Timeline

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
"""What a cell keeps of a replay's report."""


def replayed(
    shape: Shape,
    rows: Sequence[TraceRow],
    memory_bytes: int,
    manager: Manager,
    *,
    core_of: Callable[[Layout], MemoryCore] = create_core,
    limits_of: Callable[[Layout, int], Limits] = replay_limits,
    timeline: Timeline | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Replay:
    """Replay rows that all wait at the start, sessions or not: vLLM's side knows none.

    :param limits_of: from pages and the model's own longest request.
    :raises ChangeSomething: if the memory holds no request of the shape under this manager.
    """
    layers = shape.description.layers
    layout = plan_layout(layers, memory_bytes, manager=manager)
    cost = model_cost(shape.config, shape.description, ELEMENT_BYTES)
    run = Replay(
        core_of(layout),
        layers,
        limits_of(layout, shape.description.max_model_len),
        rows,
        "start",
        Machine(load_profile(DEFAULT_HARDWARE), cost),
        MonotonicClock(),
        timeline=timeline,
        sessions=False,
        images_in_text=shape.images_in_text,
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
        run = replayed(shape, rows, memory_bytes, manager, progress=progress)
    except ChangeSomething as error:
        return {"refused": str(error)}
    report = run.report()
    figures = {name: report[name] for name in KEPT}
    return figures | {"kv_memory_bytes": memory_bytes, "decisions": digest(run.requests)}


def digest(requests: Sequence[RequestFigures]) -> str:
    """Equal for two runs that hit, admitted, answered and finished everybody in the same steps."""
    told = json.dumps([astuple(figures) for figures in requests])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
