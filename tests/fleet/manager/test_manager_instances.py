"""What fronts hear of instances: at each change, whoever made it."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import kvell.fleet.manager.manager as manager_module
from kvell.fleet.manager.messages import Answer, FrontBeat, Roster, ScaleInstances
from kvell.fleet.started.members import Members
from tests.fleet.manager.front_client import HeldSite, joined, managed, one_front, two_fronts
from tests.front.scenarios import is_gone, until

CommandFactory = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def only_changes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told because time passes."""
    monkeypatch.setattr(manager_module, "ROSTER_SECONDS", 1_000.0)


async def test_a_front_that_joins_hears_which_instances_there_are(
    instance_command: CommandFactory,
) -> None:
    async with one_front(instance_command(), {"mixed": 2}) as (one, front):
        assert front.met.instance == "manager"
        assert front.roster.manager == front.met.incarnation == one.manager.incarnation
        assert (front.roster.failed, front.roster.exit_code) == ("", None)
        for number, entry in enumerate(front.roster.instances):
            assert (entry.instance_id, entry.role) == (f"mixed-{number}", "mixed")
            assert (entry.restarts, entry.ended) == (0, None)
            assert entry.incarnation and not is_gone(entry.pid)
        assert len(set(front.pids())) == 2
        async with await joined(one.manager, "front-b") as other:
            await until(lambda: bool(other.rosters))
            assert other.roster == front.roster


async def test_rosters_say_that_the_first_instances_start(instance_command: CommandFactory) -> None:
    site = HeldSite()
    async with (
        managed(instance_command(), {"mixed": 2}, site=site) as one,
        await joined(one.manager) as front,
    ):
        await until(lambda: bool(front.rosters))
        assert front.roster.is_starting
        assert front.states() == {"mixed-0": "starting", "mixed-1": "starting"}
        assert front.pids() == [0, 0]
        refused = await front.scale({"mixed": 3})
        assert refused.field == "instances" and "does not serve" in refused.problem
        assert set(front.states()) == {"mixed-0", "mixed-1"}
        site.lets.set()
        await front.serving(2)


async def test_every_front_hears_that_instances_are_added(instance_command: CommandFactory) -> None:
    async with two_fronts(instance_command(), {"mixed": 1}) as (_, front, other):
        assert await front.scale({"mixed": 3}) == Answer(1)
        await front.serving(3)
        await other.serving(3)
        for told in (front, other):
            states = [
                {entry.instance_id: entry.state for entry in roster.instances}
                for roster in told.rosters
            ]
            starting = {"mixed-0": "serving", "mixed-1": "starting", "mixed-2": "starting"}
            assert starting in states


async def test_what_changes_at_once_is_told_once(instance_command: CommandFactory) -> None:
    async with one_front(instance_command(), {"mixed": 4}) as (_, front):
        pids = front.pids()
        assert await front.scale({"mixed": 1}) == Answer(1)
        # Another roster, about what changed before, may come first.
        draining = {"mixed-0": "serving"} | dict.fromkeys(
            ("mixed-1", "mixed-2", "mixed-3"), "draining"
        )
        await until(lambda: "draining" in front.states().values())
        told = [
            {entry.instance_id: entry.state for entry in roster.instances}
            for roster in front.rosters
        ]
        assert next(states for states in told if "draining" in states.values()) == draining
        await front.serving(1)
        assert [is_gone(pid) for pid in pids] == [False, True, True, True]


async def test_an_instance_is_drained_by_name(instance_command: CommandFactory) -> None:
    async with one_front(instance_command(), {"mixed": 2}) as (_, front):
        (pid, _) = front.pids()
        assert await front.drain("mixed-0") == Answer(1)
        await front.serving(1)
        assert set(front.states()) == {"mixed-1"} and is_gone(pid)
        last = await front.drain("mixed-1")
        assert (last.field, last.value) == ("id", "mixed-1")
        assert "last one" in last.problem and "add one" in last.remedy
        assert front.states() == {"mixed-1": "serving"}


@pytest.mark.parametrize(
    ("instances", "field", "problem"),
    [
        ({"prefill": 2}, "instances", "no instance"),
        ({"boss": 2}, "instances", "not a role"),
        ({"mixed": 0}, "instances", "between 1 and"),
        ({"mixed": -4}, "instances", "between 1 and"),
        ({}, "instances", "names no role"),
    ],
)
async def test_what_cannot_be_is_answered(
    instance_command: CommandFactory, instances: dict[str, int], field: str, problem: str
) -> None:
    async with one_front(instance_command(), {"mixed": 1}) as (_, front):
        answer = await front.scale(instances)
        assert answer.field == field and problem in answer.problem and answer.remedy
        other = await front.drain("mixed-9")
        assert (other.field, other.value, other.call) == ("id", "mixed-9", answer.call + 1)
        assert front.states() == {"mixed-0": "serving"}


async def test_an_instance_that_is_killed_comes_back_as_another_incarnation(
    instance_command: CommandFactory,
) -> None:
    async with one_front(instance_command(), {"mixed": 2}) as (_, front):
        before = front.entry("mixed-1")
        seen = len(front.rosters)
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: front.entry("mixed-1").ended is not None)
        told = next(
            entry
            for roster in front.rosters[seen:]
            for entry in roster.instances
            if entry.ended is not None
        )
        assert (told.instance_id, told.state, told.pid) == ("mixed-1", "restarting", 0)
        await until(lambda: front.entry("mixed-1").state == "serving")
        after = front.entry("mixed-1")
        assert after.ended == told.ended and after.ended is not None
        assert (after.ended.incarnation, after.ended.cause) == (before.incarnation, "killed")
        assert "exit -9" in after.ended.problem
        assert after.incarnation != before.incarnation and after.pid != before.pid
        assert after.restarts == 1
        assert front.entry("mixed-0").ended is None and front.entry("mixed-0").restarts == 0


async def test_an_instance_that_cannot_be_restarted_fails_until_it_can(
    instance_command: CommandFactory, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    async with one_front(instance_command("--starts-once", str(started)), {"mixed": 1}) as (
        one,
        front,
    ):
        os.kill(front.pids()[0], signal.SIGKILL)
        await until(lambda: front.states() == {"mixed-0": "failing"})
        entry = front.entry("mixed-0")
        assert entry.ended is not None and entry.ended.cause == "killed"
        assert not one.running.done(), "a front may still ask for others"
        started.unlink()
        await front.serving(1)


async def test_newer_roles_that_one_front_knows_are_told_to_all(
    instance_command: CommandFactory,
) -> None:
    async with two_fronts(instance_command(), {"prefill": 1, "decode": 1}) as (_, front, other):
        front.say(FrontBeat({}, {"decode-0": "prefill"}, 3))
        await until(lambda: other.roster.role_changes == 3)
        assert other.entry("decode-0").role == "prefill"


async def test_an_error_of_our_own_while_an_order_is_carried_out_ends_that_connection_alone(
    instance_command: CommandFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_self: Members, _counts: dict[str, int]) -> None:
        raise ZeroDivisionError

    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    async with (
        managed(instance_command(), {"mixed": 1}) as one,
        await joined(one.manager) as front,
        await joined(one.manager, "front-b") as other,
    ):
        await front.serving(1)
        monkeypatch.setattr(Members, "scale", breaks)
        front.say(ScaleInstances(1, {"mixed": 2}))
        await front.hung_up()
        assert await other.drain("mixed-9")
        assert not other.is_hung_up and isinstance(other.roster, Roster)
