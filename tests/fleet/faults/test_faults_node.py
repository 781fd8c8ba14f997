"""A node of a cluster dies under load: what it kept is placed on another."""

import logging
from pathlib import Path
from random import Random

import pytest

from tests.fleet.faults.cluster import Cluster, cluster
from tests.fleet.placing.ray_machines import is_gone
from tests.front.scenarios import run, until

logger = logging.getLogger(__name__)


async def node_dies(one: Cluster, chance: Random, *, with_all: bool) -> None:
    """Its instances end, and come again elsewhere as new incarnations; others stay.

    :param with_all: whether its instances are killed in the same moment; else they notice that
        their keeper is gone, and end by themselves.
    """
    before = one.machines.incarnations()
    await one.machines.add_node()
    node = chance.choice([node for node in one.machines.nodes if one.machines.placed_on(node)])
    lost = await one.machines.kill_node(node, with_all=with_all)
    assert node.is_dead and lost
    await until(lambda: all(is_gone(pid) for pid in lost.values()))
    await until(lambda: all(one.machines.incarnations()[name] != before[name] for name in lost))
    await one.whole()
    now = one.machines.incarnations()
    assert {name for name in before if now[name] != before[name]} == set(lost)


@pytest.mark.parametrize(
    "faults", [1, *(pytest.param(count, marks=pytest.mark.long) for count in (4, 100))]
)
def test_what_a_dead_node_had_goes_on_elsewhere(faults: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        chance = Random(faults)
        async with cluster(tmp_path, faults) as one:
            for number in range(faults):
                await one.goes_on(chance.randint(1, 300))
                await node_dies(one, chance, with_all=number % 2 == 1)
        logger.info("%d nodes died: %s", faults, one.judge())
        assert sum(front.load.again for front in one.fronts) > 0

    run(scenario(), 60 + 8 * faults)
