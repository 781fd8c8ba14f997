from collections.abc import Sequence
from typing import Any

from kvell.cost.analytic import DeviceProfile, ModelCost
from kvell.memory import GroupKind, LayerSpec, Layout, plan_layout
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.rows import TraceRow
from tests.simulator.cluster.schedules import row as drawn_row

ONE_EACH = {"prefill": 1, "decode": 1}


def run_of(spec: ClusterSpec, rows: Sequence[TraceRow], **more: Any) -> VirtualCluster:
    cluster = VirtualCluster(spec, rows, **more)
    cluster.run()
    return cluster


QUIET: dict[str, Any] = {
    "mix": "windows",
    "counts": ONE_EACH,
    "large": 50,
    "seats": 4,
    "batched": 16,
    "pd_caching": 3,
    "routing": "least-load",
    "loss": 0.0,
    "duplication": 0.0,
    "jitter_seconds": 0.0,
    "page_seconds": 0.0,
    "front_seconds": [0.0],
    "rows": [drawn_row(0.0, 40, 14)],
}

POOL_TOKENS = 8192

MACHINE = Machine(DeviceProfile("test", 1e12, 1.0, 1e12, 1.0, 0.01), ModelCost(1, 0, 1))


"""A step takes ten milliseconds, whatever its work."""


def layout_of_one_layer() -> Layout:
    """A pool of POOL_TOKENS tokens in pages of 16, one to a large page."""
    layers = [LayerSpec(0, GroupKind.FULL, 2, 8, 2, 0)]
    large_bytes = plan_layout(layers, 1 << 20, page_tokens=16).large_page_bytes
    return plan_layout(layers, large_bytes * (POOL_TOKENS // 16), page_tokens=16)
