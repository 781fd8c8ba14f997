"""Connections of a cluster are cut in the middle of what they carry, or carry nothing any more."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from tests.fleet.faults.cluster import Cluster, cluster
from tests.fleet.placing.ray_machines import is_gone
from tests.front.scenarios import run, until

logger = logging.getLogger(__name__)
Fault = Callable[[Cluster, Random], Awaitable[None]]


def some_instance(one: Cluster, chance: Random) -> str:
    return chance.choice(sorted(one.machines.incarnations()))


async def cut(one: Cluster, opener: str, to: str) -> None:
    """Cut wires in the middle of what they carry; nothing is started again for that."""
    started = list(one.machines.started)
    wires = await one.wires.cut(opener, to)
    assert wires
    assert all(wire.lost_bytes and wire.carried_bytes for wire in wires)
    await one.whole()
    assert one.machines.started == started


async def front_from_instance(one: Cluster, chance: Random) -> None:
    await cut(one, chance.choice(one.fronts).name, some_instance(one, chance))


async def fronts_from_instance(one: Cluster, chance: Random) -> None:
    await cut(one, "front-*", some_instance(one, chance))


async def front_from_all(one: Cluster, chance: Random) -> None:
    await cut(one, chance.choice(one.fronts).name, "*")


async def fronts_from_manager(one: Cluster, chance: Random) -> None:
    await cut(one, "front-*", "manager")


async def manager_from_instance(one: Cluster, chance: Random) -> None:
    await cut(one, "manager-*", some_instance(one, chance))


async def silent_manager(one: Cluster, chance: Random) -> None:
    """An instance is declared dead wrongly: nobody else sees anything wrong with it."""
    name = some_instance(one, chance)

    async def silenced() -> None:
        one.wires.silence("manager-*", name)
        held = one.wires.between("manager-*", name)
        await until(lambda: all(wire.held_bytes for wire in held))

    await _replaced(one, name, silenced())


async def _replaced(one: Cluster, name: str, fault: Awaitable[object]) -> None:
    """After a fault of its wire to the manager, an instance comes again as a new incarnation."""
    before, pid = one.machines.incarnations(), one.machines.pid_of(name)
    await fault
    await until(lambda: is_gone(pid))
    one.wires.heal()
    await until(lambda: one.machines.incarnations()[name] != before[name])
    await one.whole()
    now = one.machines.incarnations()
    assert {other for other in before if now[other] != before[other]} == {name}
    served = await _served(one, name)
    while await _served(one, name) == served:
        await one.goes_on(20)


async def _served(one: Cluster, name: str) -> int:
    return (await one.stats())[name].finished.get("length", 0)


async def silent_instance(one: Cluster, chance: Random) -> None:
    """A front takes its line for dead; what comes late changes nothing."""
    started = list(one.machines.started)
    front, name = chance.choice(one.fronts), some_instance(one, chance)
    one.wires.silence(front.name, name)
    held = one.wires.between(front.name, name)
    await until(lambda: all(wire.held_bytes for wire in held))
    await until(lambda: not front.is_served_by(name))
    await front.load.goes_on(200)
    one.wires.heal()
    await one.whole()
    assert one.machines.started == started


async def silence_between_fronts_and_manager(one: Cluster, chance: Random) -> None:
    """It is bridged, or the fronts dial again."""
    started = list(one.machines.started)
    one.wires.silence("front-*", "manager")
    held = one.wires.between("front-*", "manager")
    await until(lambda: all(wire.held_bytes for wire in held))
    await one.goes_on(chance.randint(100, 2000))
    one.wires.heal()
    await one.whole()
    assert one.machines.started == started


FAULTS: tuple[Fault, ...] = (
    front_from_instance,
    silent_manager,
    fronts_from_instance,
    manager_from_instance,
    front_from_all,
    silent_instance,
    fronts_from_manager,
    silence_between_fronts_and_manager,
)


@pytest.mark.parametrize(
    "faults", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (len(FAULTS), 100))]
)
def test_partitions_lose_no_request(faults: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        chance = Random(faults)
        async with cluster(tmp_path, faults) as one:
            for number in range(faults):
                await one.goes_on(chance.randint(1, 300))
                await FAULTS[number % len(FAULTS)](one, chance)
        logger.info("%d partitions: %s", faults, one.judge())

    run(scenario(), 60 + 8 * faults)
