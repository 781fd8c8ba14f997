"""Processes of a cluster that die at a given moment."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from tests.fleet.faults.cluster import Cluster
from tests.fleet.faults.instances import FAKES, Instances
from tests.fleet.faults.load import unexplained
from tests.fleet.faults.machines.orders import ROOT
from tests.fleet.placing.ray_machines import is_gone
from tests.front.scenarios import until


@dataclass
class DoomedFront:
    """A front in a process of its own, whose requests never end by themselves."""

    process: asyncio.subprocess.Process
    name: str

    async def kill(self) -> None:
        self.process.kill()
        assert await self.process.wait() == -signal.SIGKILL
        assert self.process.stdout is not None
        assert await self.process.stdout.read() == b"", "one of its requests got something wrong"

    async def end(self, instances: Instances) -> int:
        """Let some of its requests end, and then itself; how many got their answers."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        told = json.loads(await self.process.stdout.readline())
        wrong, ends, refusals, turned_away = told
        assert wrong == unexplained(refusals, instances.refusals) == []
        assert unexplained(turned_away, instances.barred) == []
        assert await self.process.wait() == 0
        return int(ends.get("length", 0))


@asynccontextmanager
async def doomed_front(one: Cluster, seed: int) -> AsyncIterator[DoomedFront]:
    """It serves when this begins."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fleet.faults.front_process"),
        *(one.managed.address, str(one.instances.streams), str(seed), *one.instances.jobs),
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(one.secret)
        name, in_flight = (await process.stdout.readline()).decode().split()
        assert int(in_flight) == one.instances.streams or one.instances.jobs
        yield DoomedFront(process, name)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process.stdin.close()


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
