"""The machines that Ray knows."""

import ray
from ray._private.state import available_resources_per_node

from kvell.fleet.placing.ray.room import PROCESSOR, SHARED, Machine


def machines() -> list[Machine]:
    """Return all machines that Ray knows, those that died too."""
    free = available_resources_per_node()
    return [
        Machine(
            str(one["NodeID"]),
            str(one["NodeManagerAddress"]),
            bool(one["Alive"]),
            float(one["Resources"].get(PROCESSOR, 0.0)),
            float(free.get(one["NodeID"], {}).get(PROCESSOR, 0.0)),
            SHARED in one["Resources"],
        )
        for one in ray.nodes()
    ]


def processors_here() -> float:
    """Return the CPUs that Ray has for the machine of this process."""
    here = ray.get_runtime_context().get_node_id()
    return next((one.processors for one in machines() if one.node_id == here), 1.0)
