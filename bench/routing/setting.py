"""Virtual clusters of one kind of device, shared by the benches of this folder."""

from dataclasses import replace
from typing import Any

from bench.replay.shapes import ELEMENT_BYTES, read_shape
from kvell.cli.replay.command import replay_limits
from kvell.cost.amounts import shape_of
from kvell.cost.analytic import AnalyticModel
from kvell.cost.prices import prices_of
from kvell.memory import plan_layout
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec
from kvell.simulator.cluster.instance import Links
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_link, load_profile
from kvell.simulator.replay.runner import Machine
from kvell.vocabulary import GIB

HYBRID, ATTENTION = "nemotron-h-8b", "llama3-8b"
POOL_BYTES = 48 * GIB
"""Of one device of 80 GB, without the weights and room for activations."""
MOST_MODEL_TOKENS = 131_072
BATCHED_TOKENS = 2_048


def cluster_spec(
    counts: dict[str, int], model: str = ATTENTION, pool_bytes: int = POOL_BYTES, **more: Any
) -> ClusterSpec:
    """H800s with one model on each, connected by NVLink.

    :param model: of ``bench/configs``.
    :param more: further fields of the spec.
    """
    shape = read_shape(model)
    layout = plan_layout(shape.description.layers, pool_bytes)
    most = min(shape.description.max_model_len, MOST_MODEL_TOKENS)
    limits = replace(replay_limits(layout, most), max_num_batched_tokens=BATCHED_TOKENS)
    machine = Machine(
        load_profile("h800"), model_cost(shape.config, shape.description, ELEMENT_BYTES)
    )
    link = load_link("nvlink-h800")
    links = Links(Link(link.latency_seconds, link.bytes_per_second))
    costs = prices_of(
        AnalyticModel(machine.profile, machine.cost),
        shape_of(shape.description.layers),
        fetch_bytes_per_second=link.bytes_per_second,
        swap_bytes_per_second=link.bytes_per_second,
        chunk_tokens=BATCHED_TOKENS,
    )
    return ClusterSpec(counts, layout, limits, machine, links, costs=costs, hosts=None, **more)
