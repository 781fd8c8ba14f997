"""An instance that works is started again however often somebody kills it."""

import os
import signal

from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.instance_process import dial_instance
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.vocabulary import RequestId
from kvell.wire.greeting import Greeting
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
