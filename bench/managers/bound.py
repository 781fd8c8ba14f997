"""One cell with an ideal packer: what the same scheduler would do if pages cost nothing."""

from collections.abc import Sequence
from typing import Any

from bench.managers.ours import KEPT
from bench.replay.ideal import IdealCore
from bench.replay.shapes import ELEMENT_BYTES, Shape
from kvell.cli.replay import replay_limits
from kvell.clock import MonotonicClock
from kvell.memory import plan_layout
from kvell.simulator.model_cost import model_cost
from kvell.simulator.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay import Replay
from kvell.simulator.rows import TraceRow
from kvell.simulator.runner import Machine


def bound(shape: Shape, rows: Sequence[TraceRow], memory_bytes: int) -> dict[str, Any]:
    """The figures of rows that share nothing: it counts needed bytes, and caches none.

    :raises ChangeSomething: if the memory holds no request of the shape.
    """
    layers = shape.description.layers
    layout = plan_layout(layers, memory_bytes)
    cost = model_cost(shape.config, shape.description, ELEMENT_BYTES)
    run = Replay(
        IdealCore(layout),
        layers,
        replay_limits(layout, shape.description.max_model_len),
        rows,
        "start",
        Machine(load_profile(DEFAULT_HARDWARE), cost),
        MonotonicClock(),
        sessions=False,
        images_in_text=shape.images_in_text,
    )
    run.run()
    report = run.report()
    return {name: report[name] for name in KEPT} | {"kv_memory_bytes": memory_bytes}
