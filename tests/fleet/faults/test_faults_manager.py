"""The manager of a cluster is killed under load, and started again: requests notice nothing."""

import logging
import os
import signal
from pathlib import Path
from random import Random

import pytest

from tests.fleet.faults.cluster import Cluster, cluster
from tests.fleet.faults.instances import FAKES
from tests.fleet.placing.ray_machines import is_gone
from tests.front.scenarios import run, until

logger = logging.getLogger(__name__)


async def manager_dies(one: Cluster, chance: Random, least_ends: int = FAKES.streams + 1) -> None:
    """Kill it; requests begin and end while it is away; it comes back, here or elsewhere.

    :param least_ends: of each front; by default more than run at once.
    """
    started, pid = len(one.machines.started), one.managed.pid
    assert await one.managed.kill() == -signal.SIGKILL
    assert is_gone(pid)
    await until(lambda: not one.wires.between("*", "manager"))
    for front in one.fronts:
        await front.load.ends_more(chance.randint(least_ends, 3 * least_ends))
    rosters = {front.roster.manager for front in one.fronts}
    await one.managed.start(elsewhere=chance.random() < 0.5)
    await until(lambda: all(front.roster.manager not in rosters for front in one.fronts))
    await one.whole()
    assert len(one.machines.started) == started, "it started what was there already"


async def manager_dies_behind_an_instance(one: Cluster, chance: Random, tokens: int = 200) -> None:
    """An instance that dies while nobody watches is started again by the next manager.

    :param tokens: that each front gets meanwhile from the others.
    """
    name = chance.choice(sorted(one.machines.incarnations()))
    before, started = one.machines.incarnations()[name], len(one.machines.started)
    pid = one.machines.pid_of(name)
    await one.managed.kill()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: is_gone(pid))
    await one.goes_on(tokens)
    assert len(one.machines.started) == started
    await one.managed.start()
    await until(lambda: len(one.machines.started) > started)
    await one.whole()
    assert len(one.machines.started) == started + 1
    assert one.machines.incarnations()[name] != before


async def manager_dies_in_a_start(one: Cluster, chance: Random) -> None:
    """What it was starting is adopted or replaced, and never there twice."""
    name = chance.choice(sorted(one.machines.incarnations()))
    before = one.machines.incarnations()
    os.kill(one.machines.pid_of(name), signal.SIGKILL)
    await until(lambda: name in one.machines.starting)
    await one.managed.kill()
    await one.managed.start(elsewhere=chance.random() < 0.5)
    await one.whole()
    now = one.machines.incarnations()
    assert {other for other in before if now[other] != before[other]} == {name}
    await until(lambda: not one.machines.strays())


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
