"""Any process of a cluster with every mechanism dies or sleeps at random moments: front, manager,
node or instance.  No answer changes, and nothing is left."""

import itertools
import logging
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from kvell.cluster.instances import parse_instances
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.command import placed_command
from kvell.fleet.placing.launcher import PROGRAM
from tests.async_engine.fault_cases import ACTS, LENDING_REFUSALS, SHAPES
from tests.async_engine.handover_faults import acts_of, asleep
from tests.async_engine.jobs import Job, write_jobs
from tests.async_engine.lending_jobs import everything, mixed_jobs
from tests.fleet.faults.cluster import Cluster, cluster
from tests.fleet.faults.doomed import (
    doomed_front,
    manager_dies,
    manager_dies_behind_an_instance,
    manager_dies_in_a_start,
    node_dies,
)
from tests.fleet.faults.instances import Instances
from tests.fleet.faults.load import known_requests
from tests.fleet.placing.ray_machines import is_gone
from tests.front.scenarios import run, until

pytestmark = pytest.mark.long
logger = logging.getLogger(__name__)

FAULTS_OF_A_RUN, STREAMS = 40, 3
MOST_TOKENS = 60
"""Of each front, between two faults at most."""
SILENCE_SECONDS = 6.0
MOST_ASLEEP_SECONDS = 4.0
LONG_ASLEEP_SECONDS = 14.0
"""Longer than a front's lease."""
MOST_SECONDS = 3000
BARRED = ("no instance serves", *LENDING_REFUSALS)

Fault = Callable[[Cluster, Random], Awaitable[None]]


def some_instance(one: Cluster, chance: Random) -> str:
    return chance.choice(sorted(one.machines.incarnations()))


def some_seconds(chance: Random) -> float:
    return chance.uniform(0, MOST_ASLEEP_SECONDS)


async def front_dies(one: Cluster, chance: Random) -> None:
    async with doomed_front(one, chance.getrandbits(32)) as doomed:
        assert one.wires.between(doomed.name, "*-[0-9]")
        await one.goes_on(chance.randint(1, MOST_TOKENS))
        await doomed.kill()
    assert is_gone(doomed.process.pid)
    await until(lambda: not one.wires.between(doomed.name, "*"))


async def front_sleeps(one: Cluster, chance: Random) -> None:
    """Maybe until instances and manager have given it up: it asks for the rest of its answers."""
    most = chance.choice((MOST_ASLEEP_SECONDS, LONG_ASLEEP_SECONDS))
    async with doomed_front(one, chance.getrandbits(32)) as doomed:
        await one.goes_on(chance.randint(1, MOST_TOKENS))
        await asleep(doomed.process.pid, chance.uniform(0, most))
        assert await doomed.end(one.instances)
    await until(lambda: not one.wires.between(doomed.name, "*"))


async def manager_dies_alone(one: Cluster, chance: Random) -> None:
    await manager_dies(one, chance, least_ends=1)


async def manager_dies_first(one: Cluster, chance: Random) -> None:
    """Some requests are longer than what the other instances hold: they wait for it."""
    await manager_dies_behind_an_instance(one, chance, tokens=0)


async def manager_sleeps(one: Cluster, chance: Random) -> None:
    started = list(one.machines.started)
    await asleep(one.managed.pid, some_seconds(chance))
    await one.whole()
    assert one.machines.started == started


async def instance_dies(one: Cluster, chance: Random) -> None:
    await instance_ends(one, some_instance(one, chance), signal.SIGKILL)


async def instance_hangs(one: Cluster, chance: Random) -> None:
    """It is stopped until the manager gives it up."""
    await instance_ends(one, some_instance(one, chance), signal.SIGSTOP)


async def instance_ends(one: Cluster, name: str, number: signal.Signals) -> None:
    before, pid = one.machines.incarnations(), one.machines.pid_of(name)
    os.kill(pid, number)
    await until(lambda: is_gone(pid))
    await until(lambda: one.machines.incarnations()[name] != before[name])
    await one.whole()
    now = one.machines.incarnations()
    assert {other for other in before if now[other] != before[other]} == {name}


async def instance_sleeps(one: Cluster, chance: Random) -> None:
    started = list(one.machines.started)
    await asleep(one.machines.pid_of(some_instance(one, chance)), some_seconds(chance))
    await one.whole()
    assert one.machines.started == started


async def node_dies_first(one: Cluster, chance: Random) -> None:
    await node_dies(one, chance, with_all=False)


async def node_dies_with_all(one: Cluster, chance: Random) -> None:
    await node_dies(one, chance, with_all=True)


async def node_sleeps(one: Cluster, chance: Random) -> None:
    """Its instances serve meanwhile."""
    started, node = list(one.machines.started), chance.choice(one.machines.nodes)
    await asleep(node.process.pid, some_seconds(chance))
    await one.whole()
    assert one.machines.started == started


FAULTS: tuple[Fault, ...] = (
    front_dies,
    instance_dies,
    manager_dies_alone,
    node_dies_first,
    front_sleeps,
    instance_sleeps,
    manager_sleeps,
    instance_hangs,
    manager_dies_first,
    node_dies_with_all,
    node_sleeps,
    manager_dies_in_a_start,
)


@pytest.fixture(scope="module")
def settings(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return EngineSettings(**everything(smollm2_path, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def jobs(settings: EngineSettings) -> list[Job]:
    return mixed_jobs(Path(settings.model))


@pytest.mark.timeout(MOST_SECONDS + 100)
@pytest.mark.parametrize("shape", SHAPES)
def test_forty_faults_of_any_process(
    settings: EngineSettings,
    jobs: list[Job],
    shape: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = tmp_path / "left"
    left.mkdir()
    monkeypatch.setenv("TMPDIR", str(left))
    write_jobs(tmp_path / "jobs", jobs)
    instances = Instances(
        parse_instances(shape),
        program=PROGRAM,
        words=tuple(placed_command(settings)),
        streams=STREAMS,
        links=8,
        draw=known_requests(jobs),
        jobs=(str(tmp_path / "jobs"),),
        refusals=LENDING_REFUSALS,
        barred=BARRED,
        startup_seconds=120.0,
        silence_seconds=SILENCE_SECONDS,
    )
    happened, acts = Counter[str](), Counter[str]()

    async def audited(one: Cluster) -> None:
        for stats in (await one.stats()).values():
            acts.update(act for act, count in acts_of(stats).items() if count)

    async def scenario() -> None:
        chance = Random(shape)
        async with cluster(tmp_path, 0, instances=instances) as one:
            for fault in itertools.islice(itertools.cycle(FAULTS), FAULTS_OF_A_RUN):
                await one.goes_on(chance.randint(1, MOST_TOKENS))
                await audited(one)
                await fault(one, chance)
                await audited(one)
                happened[fault.__name__] += 1
                logger.info("%d: %s", happened.total(), fault.__name__)
        logger.info("%s; %s; acted: %s", dict(happened), one.judge(), dict(acts))

    run(scenario(), MOST_SECONDS)
    assert happened.total() == FAULTS_OF_A_RUN
    sought = [act for act in ACTS if act != "moved" or "prefill" in instances.counts]
    assert [act for act in sought if not acts[act]] == []
    assert list(left.iterdir()) == []
