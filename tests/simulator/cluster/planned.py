from dataclasses import replace
from typing import Any

from kvell.cost.amounts import shape_of
from kvell.cost.analytic import AnalyticModel
from kvell.cost.prices import prices_of
from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, LayerSpec
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.instance import Links
from kvell.simulator.traces.rows import TraceRow
from tests.simulator.cluster.runs import MACHINE, POOL_TOKENS, layout_of_one_layer
from tests.simulator.replays import row

LAYOUT = layout_of_one_layer()

LAYERS = [LayerSpec(0, GroupKind.FULL, 2, 8, 2, 0)]

ROWS = [row(6000, 1500, at=0.0), row(400, 900, at=0.1), row(2000, 100, at=4.0)]


"""A long request on one instance, a short one on the other, and one that waits for the long one's
memory."""


def spec_of(**changes: Any) -> ClusterSpec:
    costs = prices_of(
        AnalyticModel(MACHINE.profile, MACHINE.cost),
        shape_of(LAYERS),
        fetch_bytes_per_second=1e9,
        swap_bytes_per_second=1e9,
    )
    spec = ClusterSpec(
        {"mixed": 2},
        LAYOUT,
        Limits(2048, 8, max_model_len=POOL_TOKENS),
        MACHINE,
        Links(Link(0.001, 1e9)),
        routing="round-robin",
        costs=costs,
    )
    return replace(spec, **changes)


def run_of(rows: list[TraceRow] = ROWS, **changes: Any) -> VirtualCluster:
    cluster = VirtualCluster(spec_of(**changes), rows)
    cluster.run()
    return cluster


def waits(cluster: VirtualCluster) -> float:
    """Seconds from the last request's arrival to its first token."""
    last = cluster.front.requests[-1]
    assert last.first_token_seconds is not None and last.came_seconds is not None
    return last.first_token_seconds - last.came_seconds
