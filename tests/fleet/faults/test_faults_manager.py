"""The manager of a cluster, or a node, is killed under load: requests notice nothing."""

import logging
from pathlib import Path
from random import Random

import pytest

from tests.fleet.faults.cluster import cluster
from tests.fleet.faults.doomed import (
    manager_dies,
    manager_dies_behind_an_instance,
    manager_dies_in_a_start,
    node_dies,
)
from tests.front.scenarios import run

logger = logging.getLogger(__name__)

FAULTS = (manager_dies, manager_dies, manager_dies_behind_an_instance, manager_dies_in_a_start)


@pytest.mark.parametrize(
    "faults", [1, *(pytest.param(count, marks=pytest.mark.long) for count in (4, 100))]
)
def test_a_manager_that_dies_is_missed_by_no_request(faults: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        chance = Random(faults)
        async with cluster(tmp_path, faults) as one:
            for number in range(faults):
                await one.goes_on(chance.randint(1, 300))
                await FAULTS[number % len(FAULTS)](one, chance)
        logger.info("%d managers died: %s", faults, one.judge())
        assert all(front.load.ends["length"] for front in one.fronts)

    run(scenario(), 60 + 8 * faults)


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
