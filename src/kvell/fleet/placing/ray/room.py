"""Which machines have room for instances: decided from Ray's figures alone.

On a machine of a cluster an instance reserves a CPU.  A Ray that ``--cluster local-ray`` starts
offers :data:`SHARED` instead: any number of instances share its CPUs, as instances of one front do.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvell.errors import ChangeSomething

PROCESSOR = "CPU"
SHARED = "kvell_shared_machine"
"""A resource of a machine whose CPUs are shared; an instance reserves one unit of it."""
SHARED_UNITS = 10_000
"""More than instances will ever share a machine."""


@dataclass(frozen=True)
class Machine:
    """A node of Ray.

    :param processors: CPUs that it offers, and ``free_processors`` those that are not reserved.
    :param is_shared: whether instances share its CPUs, however many they are.
    """

    node_id: str
    address: str
    is_alive: bool
    processors: float
    free_processors: float = 0.0
    is_shared: bool = False

    @property
    def fitting(self) -> int:
        if not self.is_alive:
            return 0
        return SHARED_UNITS if self.is_shared else int(self.free_processors)


def reserved_by_instance(machines: Iterable[Machine]) -> dict[str, float]:
    """Return what an instance reserves on these machines, by Ray's name of the resource.

    More than one CPU would leave no machine with room for the instances of one that died.
    """
    is_shared = any(node.is_shared for node in machines if node.is_alive)
    return {SHARED if is_shared else PROCESSOR: 1.0}


def shortage(machines: Iterable[Machine], instances: int) -> str:
    """Return what is missing for further instances, by machine; "" if they have room."""
    alive = [node for node in machines if node.is_alive]
    free = sum(node.fitting for node in alive)
    if free >= instances:
        return ""
    each = ", ".join(
        f"{node.address} has {node.fitting} of {node.processors:g} free" for node in alive
    )
    cpus = "CPU" if instances == 1 else "CPUs"
    return f"{instances} {cpus} wanted, one for each instance, and {free} free in Ray ({each})"


def no_room(machines: Iterable[Machine], instance_ids: Sequence[str]) -> ChangeSomething:
    """Return the error that says what is missing for further instances."""
    nodes = list(machines)
    counts = Counter(instance_id.rpartition("-")[0] for instance_id in instance_ids)
    value = ",".join(f"{role}={count}" for role, count in counts.items())
    left = sum(node.fitting for node in nodes)
    fewer = f"use at most {left} here, " if left else ""
    remedy = f"{fewer}end others, or add a machine with: kvell cluster up --join"
    problem = f"no room: {shortage(nodes, len(instance_ids))}"
    return ChangeSomething("--instances", value, problem, remedy)


def sharing(machines: Iterable[Machine], instances: int) -> int:
    taking = sum(1 for node in machines if node.is_alive and (node.processors or node.is_shared))
    return math.ceil(instances / max(1, taking))


def threads(offered: float, usable: int, instances: int) -> int:
    """Return the threads of an instance's steps.

    :param offered: CPUs that Ray has for its machine, and ``usable`` those that its process may
        run on: a user may let Ray offer fewer, or more.
    """
    return max(1, min(int(offered), usable) // instances)
