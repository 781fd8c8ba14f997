"""Instances that listen: fronts reach them without the manager, which may die and come again."""

import asyncio
import os
import secrets
import signal

import pytest

import kvell.fleet.manager.manager as manager_module
import kvell.fleet.placing.cluster_site as cluster_site_module
from kvell.engine.protocol.messages import Ready
from kvell.fleet.instance.instance_process import dial_instance
from kvell.fleet.manager.messages import FrontBeat, Leave
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.placing.placement import PlacedInstance, PlacingError
from kvell.wire.greeting import Greeting
from tests.fleet.manager.front_client import (
    SECRET,
    Managed,
    joined,
    managed,
    one_front,
)
from tests.fleet.placing.host_placement import HostPlacement
from tests.fleet.seen import lines_of, members_of
from tests.front.scenarios import is_gone, until
from tests.front.seen import line_to

WORDS = (
    *("--door", "{host}", "--incarnation", "{incarnation}"),
    *("--instance-id", "{instance_id}"),
)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "ROSTER_SECONDS", 0.05)


def site_of(placer: HostPlacement) -> ClusterSite:
    return ClusterSite(placer, SECRET, "kvell-test", 20.0)


async def dies(one: Managed) -> None:
    """All that the process of a manager has ends, as when it is killed."""
    one.running.cancel()
    manager = one.manager
    await manager._door.close()
    for member in members_of(manager):
        supervisor = member.supervisor
        assert supervisor._task is not None
        supervisor._task.cancel()
        line_to(supervisor).abort()
    for line in list(lines_of(manager).values()):
        line.abort()
    manager._closing = asyncio.create_task(asyncio.sleep(0))


async def test_a_front_reaches_an_instance_at_the_address_in_the_roster() -> None:
    placer = HostPlacement(SECRET)
    async with one_front(WORDS, {"mixed": 2}, site=site_of(placer)) as (_, front):
        assert len({entry.address for entry in front.roster.instances}) == 2
        for entry in front.roster.instances:
            assert entry.host == "127.0.0.1"
            told = Greeting("front-a", secrets.randbits(48), "", 0)
            line = await dial_instance(
                *(entry.address, told, SECRET, entry.instance_id, entry.incarnation)
            )
            ready = await line.first()
            assert isinstance(ready, Ready) and ready.facts.incarnation == entry.incarnation
            line.hang_up()
        front.say(Leave())
        await front.hung_up()
        assert placer.is_closed and all(is_gone(pid) for pid in front.pids())


async def test_a_manager_that_comes_again_takes_over_what_runs() -> None:
    placer = HostPlacement(SECRET)
    counts = {"prefill": 1, "decode": 2}
    async with one_front(WORDS, counts, site=site_of(placer)) as (one, front):
        front.say(FrontBeat({}, {"decode-1": "prefill"}, 6))
        await until(lambda: front.roster.role_changes == 6)
        before = front.roster
        await dies(one)
        await front.hung_up()
    async with (
        managed(WORDS, {"prefill": 1, "decode": 1}, site=site_of(placer)) as one,
        await joined(one.manager) as front,
    ):
        roles = {entry.instance_id: entry.role for entry in before.instances}
        front.say(FrontBeat({}, roles, before.role_changes))
        await front.serving(3)
        await until(lambda: front.roster.role_changes == 6)
        assert front.roster.manager != before.manager
        assert set(front.roster.instances) == set(before.instances)
        assert len(placer.started) == 3, "nothing was started again"
        old = front.entry("decode-0")
        os.kill(old.pid, signal.SIGKILL)
        await until(lambda: front.entry("decode-0").restarts == 1)
        await front.serving(3)
        ended = front.entry("decode-0").ended
        assert ended is not None
        assert (ended.incarnation, ended.cause) == (old.incarnation, "killed")
        pids = front.pids()
        front.say(Leave(ends_cluster=True))
        await front.hung_up()
        assert placer.is_closed and all(is_gone(pid) for pid in pids)


async def test_a_placer_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what runs would be started a second time."""
    monkeypatch.setattr(cluster_site_module, "LOOK_SECONDS", 0.01)

    class Away(HostPlacement):
        asked = 0

        async def find(self) -> list[PlacedInstance]:
            self.asked += 1
            if self.asked < 4:
                raise PlacingError("Ray: no answer")
            return await super().find()

    placer = Away(SECRET)
    async with one_front(WORDS, {"mixed": 1}, site=site_of(placer)) as (_, front):
        assert placer.asked == 4
        front.say(Leave())
        await front.hung_up()
