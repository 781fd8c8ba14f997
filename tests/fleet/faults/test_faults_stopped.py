"""A manager that is stopped and goes on: what others hold is theirs, however long it was away."""

import logging
import time
from pathlib import Path

import pytest

from tests.fleet.faults.cluster import cluster
from tests.fleet.faults.manager_process import STOOD_DOWN
from tests.fleet.faults.managing import ManagedCluster
from tests.front.scenarios import until

logger = logging.getLogger(__name__)


async def test_a_manager_dials_again_what_was_cut_while_it_was_stopped(tmp_path: Path) -> None:
    """As a lease does that ends meanwhile: its instances serve, and are not started again."""
    async with cluster(tmp_path, 1) as one:
        started = list(one.machines.started)
        await one.managed.stop()
        cut = await one.wires.cut("manager-*", "*")
        assert len(cut) == 3 and all(wire.lost_bytes for wire in cut)
        await one.goes_on(100)
        one.managed.go_on()
        await until(lambda: len(one.wires.between("manager-*", "*")) == len(cut))
        await one.whole()
        await one.goes_on(300)
        assert one.machines.started == started, "it started again what served"
        assert not sum(front.load.again for front in one.fronts)
    logger.info(one.judge())


async def stopped(one: ManagedCluster, seconds: float) -> None:
    """Stop a manager, and keep it so for a while."""
    await one.stop()
    until_seconds = time.monotonic() + seconds
    await until(lambda: time.monotonic() > until_seconds)


@pytest.mark.long
async def test_a_manager_that_was_away_for_longer_than_a_cluster_waits_ends_nothing(
    tmp_path: Path,
) -> None:
    """All leases have ended by its clock, and nobody has spoken for that long: it was away."""
    lease_seconds, lonely_seconds = 3.0, 3.0
    async with cluster(tmp_path, 2, (lease_seconds, lonely_seconds)) as one:
        started = list(one.machines.started)
        await stopped(one.managed, 1.5 * (lease_seconds + lonely_seconds))
        one.managed.go_on()
        heard = [front.roster for front in one.fronts]
        await until(
            lambda: all(
                front.roster is not before for front, before in zip(one.fronts, heard, strict=True)
            )
        )
        await one.whole()
        await one.goes_on(300)
        assert one.machines.started == started and not one.machines.was_closed
        assert not sum(front.load.again for front in one.fronts)
    logger.info(one.judge())


async def test_of_two_managers_the_older_stands_down_and_touches_nothing(tmp_path: Path) -> None:
    """It was stopped, another took its instances over, and it goes on."""
    async with cluster(tmp_path, 3) as one:
        started, older = list(one.machines.started), one.managed
        await older.stop()
        one.managed = older.another()
        await one.managed.start()
        named = {front.roster.epoch for front in one.fronts}
        await until(lambda: all(front.roster.epoch not in named for front in one.fronts))
        await one.wires.cut("manager-*", "*")
        older.go_on()
        assert await older.ended() == STOOD_DOWN
        await one.whole()
        await one.goes_on(300)
        assert one.machines.started == started and not one.machines.was_closed
        assert not sum(front.load.again for front in one.fronts)
    logger.info(one.judge())
