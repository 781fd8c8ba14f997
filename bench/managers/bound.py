"""One cell with an ideal packer: what the same scheduler would do if pages cost nothing."""

from collections.abc import Sequence
from typing import Any

from bench.managers.ours import KEPT, replayed
from bench.replay.ideal import IdealCore
from bench.replay.shapes import Shape
from kvell.simulator.traces.rows import TraceRow


def bound(shape: Shape, rows: Sequence[TraceRow], memory_bytes: int) -> dict[str, Any]:
    """The figures of rows that share nothing: it counts needed bytes, and caches none.

    :raises ChangeSomething: if the memory holds no request of the shape.
    """
    report = replayed(shape, rows, memory_bytes, "kvell", core_of=IdealCore).report()
    return {name: report[name] for name in KEPT} | {"kv_memory_bytes": memory_bytes}
