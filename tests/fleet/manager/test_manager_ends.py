"""When a cluster ends, and that nothing of it is left."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

import kvell.fleet.manager.manager as manager_module
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.fleet.manager.manager import Manager
from kvell.fleet.manager.messages import (
    FrontBeat,
    Leave,
    ScaleInstances,
    ToManager,
    encode_message,
)
from tests.fleet.manager.front_client import (
    QUICK,
    HeldSite,
    ReadClock,
    joined,
    managed,
    one_front,
    passes,
    two_fronts,
)
from tests.fleet.seen import fronts_of, lines_of
from tests.front.scenarios import is_gone, until

CommandFactory = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "ROSTER_SECONDS", 0.02)


async def test_the_cluster_goes_on_when_one_of_two_leaves_and_ends_if_the_last_asks(
    instance_command: CommandFactory,
) -> None:
    async with managed(instance_command(), {"mixed": 2}) as one:
        async with (
            await joined(one.manager) as front,
            await joined(one.manager, "front-b") as other,
        ):
            await other.serving(2)
            front.say(Leave())
            await front.hung_up()
            heard = len(other.rosters)
            await until(lambda: len(other.rosters) > heard)
            pids = other.pids()
            assert not any(is_gone(pid) for pid in pids)
            other.say(Leave(ends_cluster=True))
            await other.hung_up()
            assert all(is_gone(pid) for pid in pids), "it hangs up when all is ended"
        await one.running
        with pytest.raises(OSError, match=r"refused|reset"):
            await joined(one.manager, "front-c")


async def test_a_front_that_comes_when_the_last_one_leaves_keeps_the_cluster(
    instance_command: CommandFactory,
) -> None:
    """The one that left is hung up on, even if it was the last for a moment."""
    async with two_fronts(instance_command(), {"mixed": 1}) as (one, front, other):
        lines = lines_of(one.manager)
        first, second = (lines[name] for name in ("front-a", "front-b"))
        one.manager._front_said(first, Leave())
        one.manager._front_said(second, Leave(ends_cluster=True))
        assert one.manager._is_over
        fronts_of(one.manager).came("front-c", 0.0)
        await front.hung_up()
        await other.hung_up()
        assert not one.running.done()


async def test_of_fronts_that_are_replaced_all_at_once_the_last_is_hung_up_on_and_the_cluster_waits(
    instance_command: CommandFactory,
) -> None:
    """As when they are restarted, or a machine's shutdown ends them: their successors come."""
    clock = ReadClock()
    async with managed(instance_command(), {"mixed": 1}, clock=clock) as one:
        async with (
            await joined(one.manager) as front,
            await joined(one.manager, "front-b") as other,
        ):
            await other.serving(1)
            pids = other.pids()
            for each in (front, other):
                each.say(Leave())
                await each.hung_up()
        await passes(one, clock, 59.0)
        async with await joined(one.manager, "front-c") as third:
            await third.serving(1)
            assert third.pids() == pids
            third.say(Leave())
            await third.hung_up()
        await passes(one, clock, 61.0)
        await one.running
        assert all(is_gone(pid) for pid in pids)


async def test_nothing_that_a_front_says_after_its_leave_counts(
    instance_command: CommandFactory,
) -> None:
    async with one_front(instance_command(), {"mixed": 1}) as (one, front):
        words: list[ToManager] = [
            *(Leave(), FrontBeat({"mixed-0": 1}), ScaleInstances(1, {"mixed": 3}), Leave())
        ]
        front.say_bytes(b"".join(encode_message(one) for one in words))
        await front.hung_up()
        assert not front.answers and len(front.roster.instances) == 1
        await one.running


async def test_a_cluster_that_starts_ends_when_its_only_front_leaves(
    instance_command: CommandFactory,
) -> None:
    site = HeldSite()
    async with (
        managed(instance_command(), {"mixed": 2}, site=site) as one,
        await joined(one.manager) as front,
    ):
        front.say(Leave())
        await front.hung_up()
        await one.running
        assert site.launched == 0


async def test_a_cluster_without_any_front_ends_by_itself(instance_command: CommandFactory) -> None:
    clock = ReadClock()
    async with managed(instance_command(), {"mixed": 2}, lonely_seconds=2.0, clock=clock) as one:
        await until(lambda: not one.manager.is_starting)
        pids = [entry.pid for entry in one.manager.roster().instances]
        assert len(pids) == 2 and not any(is_gone(pid) for pid in pids)
        await passes(one, clock, 2.0)
        await one.running
        assert all(is_gone(pid) for pid in pids)


async def test_a_front_that_dies_is_waited_for(instance_command: CommandFactory) -> None:
    clock = ReadClock()
    async with managed(instance_command(), {"mixed": 1}, clock=clock) as one:
        async with await joined(one.manager) as front:
            await front.serving(1)
            pids = front.pids()
        await passes(one, clock, 10.0 + 59.0)
        async with await joined(one.manager) as front:
            await front.serving(1)
            assert front.pids() == pids
        await passes(one, clock, 10.0 + 60.0)
        await one.running
        assert all(is_gone(pid) for pid in pids)


async def test_a_front_that_is_silent_for_its_lease_is_hung_up_on(
    instance_command: CommandFactory,
) -> None:
    clock = ReadClock()
    async with two_fronts(instance_command(), {"mixed": 1}, clock=clock) as (one, front, other):
        await passes(one, clock, 6.0)
        assert (await other.drain("mixed-9")).field == "id", "that is a sign of life"
        await passes(one, clock, 6.0)
        await front.hung_up()
        assert not other.is_hung_up and not one.running.done()


async def test_fronts_hear_why_a_cluster_cannot_start(instance_command: CommandFactory) -> None:
    with pytest.raises(InstanceStartError, match="exit 2"):
        async with managed(instance_command("--exit-at-start", "2"), {"mixed": 2}) as one:
            async with await joined(one.manager) as front:
                await front.hung_up()
                assert "before it was ready" in front.roster.failed
                assert front.roster.exit_code == 2 and not front.roster.is_starting
            await until(one.running.done)


async def test_a_front_that_comes_after_a_failed_start_hears_of_it_too(
    instance_command: CommandFactory,
) -> None:
    with pytest.raises(InstanceStartError, match="exit 1"):
        async with managed(instance_command("--exit-at-start", "1"), {"mixed": 1}) as one:
            await until(lambda: bool(one.manager.roster().failed))
            assert not one.running.done()
            async with await joined(one.manager) as front:
                await front.hung_up()
                assert front.roster.failed and front.roster.exit_code == 1
            await until(one.running.done)


async def test_a_failed_start_that_nobody_asks_for_ends_too(
    instance_command: CommandFactory,
) -> None:
    clock = ReadClock()
    with pytest.raises(InstanceStartError):
        async with managed(instance_command("--exit-at-start", "1"), clock=clock) as one:
            await until(lambda: bool(one.manager.roster().failed))
            await passes(one, clock, 60.0)
            await until(one.running.done)


async def test_whoever_stops_running_it_ends_the_cluster(instance_command: CommandFactory) -> None:
    async with managed(instance_command(), {"mixed": 2}) as one:
        front = await joined(one.manager)
        await front.serving(2)
        pids = front.pids()
    assert all(is_gone(pid) for pid in pids)
    async with front:
        await front.hung_up()


async def test_an_end_that_is_interrupted_ends_all_the_same(
    instance_command: CommandFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(QUICK, drain_seconds=0.5)
    async with one_front(instance_command(), {"mixed": 1}, limits=limits) as (one, front):
        (pid,) = front.pids()
        os.kill(pid, signal.SIGSTOP)  # it drains until its deadline
        closing, close = asyncio.Event(), one.manager.close

        async def noted() -> None:
            closing.set()
            await close()

        monkeypatch.setattr(one.manager, "close", noted)
        front.say(Leave())
        await closing.wait()
        one.running.cancel()
        await front.hung_up()
        assert is_gone(pid) and one.running.cancelled()


async def load_is(manager: Manager, load: int, clock: ReadClock) -> None:
    await until(lambda: fronts_of(manager).loads(clock.now_seconds()) == {"mixed-0": load})


async def test_beats_keep_a_front(instance_command: CommandFactory) -> None:
    clock = ReadClock()
    async with one_front(instance_command(), {"mixed": 1}, clock=clock) as (one, front):
        for load in range(1, 5):
            await passes(one, clock, 8.0)
            front.say(FrontBeat({"mixed-0": load}))
            await load_is(one.manager, load, clock)
        assert not front.is_hung_up
