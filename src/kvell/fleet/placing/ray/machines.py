"""The machines of Ray."""

import ray
from ray._private.state import available_resources_per_node

from kvell.fleet.placing.ray.room import PROCESSOR, SHARED, Machine


def machines() -> list[Machine]:
    free = available_resources_per_node()
    return [
        Machine(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            bool(node["Alive"]),
            float(node["Resources"].get(PROCESSOR, 0.0)),
            float(free.get(node["NodeID"], {}).get(PROCESSOR, 0.0)),
            SHARED in node["Resources"],
        )
        for node in ray.nodes()
    ]


def processors_here() -> float:
    """Return the CPUs that Ray has for the machine of this process."""
    here = ray.get_runtime_context().get_node_id()
    return next((machine.processors for machine in machines() if machine.node_id == here), 1.0)
