"""A front of a cluster is killed under load: its requests go, and those of others stay."""

import asyncio
import logging
from pathlib import Path
from random import Random

import pytest

from kvell.engine.protocol.messages import FRONT_LEASE_SECONDS
from tests.fleet.faults.cluster import Cluster, cluster
from tests.fleet.faults.doomed import doomed_front
from tests.fleet.faults.instances import FAKES
from tests.front.scenarios import is_gone, run, until

logger = logging.getLogger(__name__)
STREAMS = FAKES.streams
TIMES = 6.0, 3.0
"""Seconds of a front's lease, and of a cluster without any front: both pass at the end."""


async def front_dies(one: Cluster, seed: int, chance: Random) -> None:
    """Its requests are cancelled where they ran, and nothing of it is left there."""
    cancelled = await one.cancelled()
    async with doomed_front(one, seed) as doomed:
        wires = one.wires.between(doomed.name, "*-[0-9]")
        assert len(wires) == len(one.machines.incarnations())
        assert sum(wire.carried_bytes for wire in wires) > 0
        await one.goes_on(chance.randint(1, 300))
        assert await one.cancelled() == cancelled
        await doomed.kill()
    assert is_gone(doomed.process.pid)
    while await one.cancelled() != cancelled + STREAMS:
        await asyncio.sleep(0.005)
    await until(lambda: not one.wires.between(doomed.name, "*"))
    await until(lambda: not one.has_leaked())
    await one.goes_on(100)
    assert one.is_whole()


async def front_dies_unheard(one: Cluster, seed: int) -> None:
    """It dies behind a partition, so that no connection says so: its lease ends."""
    cancelled, clock = await one.cancelled(), asyncio.get_running_loop()
    async with doomed_front(one, seed) as doomed:
        one.wires.silence(doomed.name, "*")
        begin = clock.time()
        await doomed.kill()
    while await one.cancelled() != cancelled + STREAMS:
        if clock.time() < begin + FRONT_LEASE_SECONDS / 2:
            assert await one.cancelled() == cancelled
        await one.goes_on(20)
    one.wires.heal()
    await until(lambda: not one.wires.between(doomed.name, "*"))


@pytest.mark.parametrize(
    "faults", [1, *(pytest.param(count, marks=pytest.mark.long) for count in (5, 100))]
)
def test_a_front_that_dies_takes_only_its_own_requests_along(faults: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        chance = Random(faults)
        async with cluster(tmp_path, faults, TIMES) as one:
            started = len(one.machines.started)
            for number in range(faults):
                if number % 20 == 4:
                    await front_dies_unheard(one, number)
                else:
                    await front_dies(one, number, chance)
            assert len(one.machines.started) == started
        logger.info("%d fronts died: %s", faults, one.judge())
        for front in one.fronts:
            assert set(front.load.ends) == {"length"}
            assert front.load.again == 0 and not front.load.turned_away

    run(scenario(), 60 + 8 * faults)
