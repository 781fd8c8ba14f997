"""The manager of a cluster, or a node, is killed under load: requests notice nothing."""

import logging
import os
import signal
from pathlib import Path
from random import Random

import pytest

from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.instance_process import dial_instance
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.vocabulary import RequestId
from kvell.wire.greeting import Greeting
from tests.fleet.faults.cluster import cluster
from tests.fleet.faults.doomed import (
    manager_dies,
    manager_dies_behind_an_instance,
    manager_dies_in_a_start,
    node_dies,
)
from tests.fleet.manager.front_client import (
    QUICK,
    SECRET,
    FrontClient,
    Managed,
    joined,
    managed,
)
from tests.fleet.placing.conftest import WORDS
from tests.fleet.placing.host_placement import HostPlacement
from tests.fleet.seen import members_of
from tests.front.scenarios import run, until

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


async def killed_at_work(one: Managed, front: FrontClient, restarts: int) -> None:
    """Let an instance work for another front than the one that hears rosters, and kill it."""
    entry = front.entry("mixed-0")
    told = Greeting("front-b", restarts, "", 0)
    line = await dial_instance(entry.address, told, SECRET, "mixed-0", entry.incarnation)
    line.send(
        Submit(RequestSpec(RequestId("front-b:1"), b"abcd", SamplingParams(max_tokens=1_000_000)))
    )
    member = members_of(one.manager)["mixed-0"]
    await until(lambda: bool(member.report and member.report.load and member.report.load.step))
    os.kill(entry.pid, signal.SIGKILL)
    await until(lambda: front.entry("mixed-0").restarts > restarts)
    line.abort()


def test_restarts_are_fruitful_though_the_manager_hears_no_token() -> None:
    """It gives up on an instance that never does anything, and tokens go to fronts alone."""
    kills = QUICK.restart.attempts + 2

    async def scenario() -> None:
        site = ClusterSite(HostPlacement(SECRET), SECRET, "kvell-test", 20)
        async with (
            managed([*WORDS, "--step-seconds", "0.001"], {"mixed": 1}, site=site) as one,
            await joined(one.manager) as front,
        ):
            for restarts in range(kills):
                await front.serving(1)
                await killed_at_work(one, front, restarts)
            await front.serving(1)
            assert front.entry("mixed-0").restarts == kills

    run(scenario(), 120)
