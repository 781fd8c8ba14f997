"""The manager of a cluster is killed under load, and started again: requests notice nothing."""

import logging
from pathlib import Path
from random import Random

import pytest

from tests.fleet.faults.cluster import cluster
from tests.fleet.faults.doomed import (
    manager_dies,
    manager_dies_behind_an_instance,
    manager_dies_in_a_start,
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
