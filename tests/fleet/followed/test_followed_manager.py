"""A front and its cluster's manager: how they meet, lose each other and meet again."""

import asyncio
import logging
import socket
from dataclasses import replace

import pytest

from kvell.errors import ChangeSomething, TryLater
from kvell.fleet.followed import followed_members
from kvell.fleet.followed.followed_members import FollowedCluster, ManagerAddress
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.fleet.manager.messages import Answer, DrainInstance, Leave, ScaleInstances
from kvell.front.front import Front
from tests.fleet.followed.scripted_cluster import (
    BEAT_SECONDS,
    FINGERPRINT,
    LIMITS,
    SECRET,
    Call,
    ScriptedInstance,
    ScriptedManager,
    cluster,
    ended,
    finish_of,
    joined,
    states,
)
from tests.front.scenarios import run, until


def one_instance() -> ScriptedInstance:
    return ScriptedInstance("mixed-0", 11)


def test_who_does_not_know_the_secret_is_shown_none() -> None:
    assert "0123456789abcdef" not in repr(ManagerAddress("tcp://h:1", SECRET, "f"))


async def test_a_front_waits_until_the_first_instances_are_ready() -> None:
    one, other = one_instance(), ScriptedInstance("mixed-1", 12)
    starting = other.entry(state="starting", address="")
    with ended(one, other):
        async with ScriptedManager(one.entry(), starting, is_starting=True) as manager:
            front = Front(joins=FollowedCluster(manager.find), limits=LIMITS)
            start = asyncio.create_task(front.start())
            await until(lambda: states(front) == {"mixed-0": "serving", "mixed-1": "starting"})
            assert not start.done()
            manager.tell(one.entry(), other.entry(), is_starting=False)
            await start
            assert set(states(front).values()) == {"serving"}
            await front.close()


async def test_the_time_to_start_is_the_managers_while_it_says_so() -> None:
    """A front gives up only if it hears nothing for longer than an instance may start."""
    one = one_instance()
    with ended(one):
        async with ScriptedManager(is_starting=True) as manager:
            joins = FollowedCluster(manager.find, beat_seconds=BEAT_SECONDS)
            front = Front(joins=joins, limits=replace(LIMITS, startup_seconds=0.5))
            start = asyncio.create_task(front.start())
            await until(lambda: len(manager.beats()) * BEAT_SECONDS > 1.0)
            manager.tell(one.entry(), is_starting=False)
            await start
            await front.close()


@pytest.mark.parametrize("code", [2, None])
async def test_a_cluster_that_cannot_start_is_an_error_with_its_exit_status(
    code: int | None,
) -> None:
    failed = "the instance ended before it was ready"
    async with ScriptedManager(is_starting=True, failed=failed, exit_code=code) as manager:
        with pytest.raises(InstanceStartError, match=failed) as caught:
            async with joined(manager):
                raise AssertionError("it serves")
        assert caught.value.exit_code == code
        assert isinstance(manager.heard[-1], Leave)


async def test_a_cluster_whose_instances_have_all_failed_is_an_error() -> None:
    one = one_instance()
    with ended(one):
        async with ScriptedManager(one.entry(state="failed", address="")) as manager:
            with pytest.raises(InstanceStartError, match="no instance of the cluster"):
                async with joined(manager):
                    raise AssertionError("it serves")


async def test_other_options_are_another_cluster() -> None:
    async with ScriptedManager(fingerprint="three instances") as manager:
        with pytest.raises(ChangeSomething, match="ours: belongs to another cluster"):
            async with joined(manager):
                raise AssertionError("it serves")
        await until(lambda: bool(manager.fronts) and not manager.sides)


async def test_what_the_user_must_change_to_find_a_manager_is_told_at_the_start() -> None:
    async def find() -> ManagerAddress:
        raise ChangeSomething("--cluster", "nowhere", "is no cluster", "use another")

    with pytest.raises(ChangeSomething, match="--cluster=nowhere"):
        async with Front(joins=FollowedCluster(find), limits=LIMITS):
            raise AssertionError("it serves")


async def test_a_manager_that_nobody_reaches_is_an_error_that_says_why() -> None:
    async def find() -> ManagerAddress:
        raise TryLater("it is not placed yet")

    limits = replace(LIMITS, startup_seconds=0.3)
    with pytest.raises(InstanceStartError, match=r"cannot reach .* \(it is not placed"):
        async with Front(joins=FollowedCluster(find), limits=limits):
            raise AssertionError("it serves")


async def test_an_instance_that_this_front_does_not_reach_is_an_error_that_says_why() -> None:
    one, elsewhere = one_instance(), ScriptedInstance("mixed-1", 12)
    with ended(one, elsewhere), socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        taken.close()
        other = elsewhere.entry(address=nobody)
        async with ScriptedManager(one.entry(), other) as manager:
            with pytest.raises(InstanceStartError, match=r"cannot reach mixed-1 \(.*refused"):
                async with joined(manager, replace(LIMITS, startup_seconds=0.5)):
                    raise AssertionError("it serves")


def test_requests_go_on_while_the_manager_is_away_and_calls_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        one = one_instance()
        with ended(one):
            manager = ScriptedManager(one.entry())
            async with joined_later(manager) as front:
                running = asyncio.create_task(finish_of(front, 200))
                await until(lambda: front.in_flight == 1)
                await manager.__aexit__()
                await until(lambda: "requests continue" in caplog.text)
                with pytest.raises(TryLater, match="manager cannot be reached"):
                    await front.scale({"mixed": 2})
                with pytest.raises(TryLater, match="manager cannot be reached"):
                    await front.drain("mixed-0")
                assert (await running).attempt == 0
                assert (await finish_of(front, 20)).reason == "length"
                assert states(front) == {"mixed-0": "serving"}

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "requests continue" in caplog.text


def joined_later(manager: ScriptedManager) -> "_Joined":
    return _Joined(manager)


class _Joined:
    """A front over a manager that the test ends."""

    def __init__(self, manager: ScriptedManager) -> None:
        self._manager = manager
        joins = FollowedCluster(manager.find, beat_seconds=BEAT_SECONDS)
        self._front = Front(joins=joins, limits=LIMITS)

    async def __aenter__(self) -> Front:
        await self._manager.__aenter__()
        await self._front.start()
        return self._front

    async def __aexit__(self, *_error: object) -> None:
        await self._front.close()


async def test_a_manager_that_comes_again_elsewhere_is_found() -> None:
    """It has forgotten everything, and hears of roles from the front."""
    one, other = one_instance(), ScriptedInstance("mixed-1", 12)
    managers = [ScriptedManager(one.entry(), role_changes=3), ScriptedManager(is_starting=True)]

    async def find() -> ManagerAddress:
        return managers[0].found

    with ended(one, other):
        async with managers[1] as second:
            async with managers[0] as first, joined(first, find=find) as front:
                managers.reverse()
                first.hang_up()
                await until(lambda: len(second.beats()) > 1)
                [(name, earlier)], [(again, later)] = first.met(), second.met()
                assert name == again and later > earlier
                assert second.beats()[0].role_changes == 3
                assert second.beats()[0].roles == {"mixed-0": "mixed"}
                assert states(front) == {"mixed-0": "serving"}, "it is not found yet, but stays"
                second.tell(one.entry(), other.entry(), is_starting=False)
                await until(lambda: len(states(front)) == 2)
                await front.scale({"mixed": 2})
                assert any(isinstance(one, ScaleInstances) for one in second.heard)
            assert isinstance(second.heard[-1], Leave)


async def test_a_manager_that_is_silent_is_dialed_again() -> None:
    one = one_instance()
    async with cluster(one) as (manager, front):
        manager.tells_again = False
        await until(lambda: len(manager.fronts) == 2)
        manager.tells_again = True
        assert states(front) == {"mixed-0": "serving"}
        (name, earlier), (again, later) = manager.met()
        assert name == again and later > earlier


async def test_a_manager_that_breaks_the_protocol_is_dialed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(one_instance()) as (manager, front):
        [side] = manager.sides
        assert side.transport is not None
        side.transport.write(b"\0" * 64)
        await until(lambda: len(manager.fronts) == 2)
        assert states(front) == {"mixed-0": "serving"}
    assert "cannot reach the cluster's manager: the header of a frame is damaged" in caplog.text


async def test_other_options_later_are_told_in_the_log_and_end_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = one_instance()
    managers = [ScriptedManager(one.entry()), ScriptedManager(fingerprint="others")]

    async def find() -> ManagerAddress:
        return managers[0].found

    with ended(one):
        async with managers[0] as first, managers[1], joined(first, find=find) as front:
            managers.reverse()
            first.hang_up()
            await until(lambda: "belongs to another cluster" in caplog.text)
            assert (await finish_of(front, 5)).reason == "length"


async def test_calls_are_answered_each_by_its_number() -> None:
    """The second is answered first."""
    async with cluster(one_instance()) as (manager, front):
        asked: list[Call] = []

        def answer(call: Call) -> Answer | None:
            asked.append(call)
            return None

        manager.answer = answer
        scale = asyncio.ensure_future(front.scale({"mixed": 99}))
        drain = asyncio.ensure_future(front.drain("mixed-0"))
        await until(lambda: len(asked) == 2)
        assert isinstance(asked[0], ScaleInstances) and asked[0].instances == {"mixed": 99}
        assert isinstance(asked[1], DrainInstance) and asked[1].instance_id == "mixed-0"
        [side] = manager.sides
        side.send(Answer(asked[1].call))
        side.send(Answer(asked[1].call))  # once too often
        side.send(Answer(4711))
        await drain
        assert not scale.done()
        side.send(Answer(asked[0].call, "instances", "99", "need more memory", "use 2"))
        with pytest.raises(ChangeSomething, match="instances=99: need more memory; use 2"):
            await scale


async def test_a_call_whose_answer_is_lost_may_be_made_again() -> None:
    async with cluster(one_instance()) as (manager, front):
        manager.answer = lambda call: None
        scale = asyncio.ensure_future(front.scale({"mixed": 2}))
        await until(lambda: any(isinstance(one, ScaleInstances) for one in manager.heard))
        manager.hang_up()
        with pytest.raises(TryLater, match="before it answered"):
            await scale


async def test_a_call_that_is_not_answered_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_members, "CALL_SECONDS", 0.05)
    async with cluster(one_instance()) as (manager, front):
        manager.answer = lambda call: None
        with pytest.raises(TryLater, match=r"did not answer within 0\.05 s"):
            await front.drain("mixed-0")


async def test_a_front_that_closes_asks_for_nothing_more() -> None:
    async with cluster(one_instance()) as (manager, front):
        pass
    with pytest.raises(TryLater, match="shutting down"):
        await front.scale({"mixed": 2})
    assert [greeting.fingerprint for greeting in manager.fronts] == [FINGERPRINT]
