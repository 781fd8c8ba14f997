"""Roles follow the load of all fronts together, and outlive the manager."""

from collections.abc import Callable

import pytest

import kvell.fleet.manager.manager as manager_module
from kvell.clock import VirtualClock
from kvell.fleet.manager.messages import FrontBeat
from tests.fleet.manager.front_client import (
    FrontClient,
    Managed,
    joined,
    one_front,
    two_fronts,
)
from tests.fleet.seen import fronts_of, loads_of
from tests.front.scenarios import until

CommandFactory = Callable[..., list[str]]
COUNTS = {"prefill": 1, "decode": 2}
HALF = 1_500
"""Prompt tokens: those of two fronts take longer than ``RoleRules.wait_seconds``, of one not."""


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "ROSTER_SECONDS", 0.01)


def roles(front: FrontClient) -> dict[str, str]:
    return {one.instance_id: one.role for one in front.roster.instances}


def beat(front: FrontClient, prompts: int) -> FrontBeat:
    return FrontBeat({"prefill-0": prompts}, roles(front), front.roster.role_changes)


async def second(one: Managed, clock: VirtualClock, *fronts: FrontClient, prompts: int) -> None:
    """A second passes; all fronts beat, and the manager looks at the roles."""
    clock.advance(1.0)
    total = {"prefill-0": prompts * len(fronts)}
    for front in fronts:
        front.say(beat(front, prompts))
    heard = [len(front.rosters) for front in fronts]
    await until(lambda: fronts_of(one.manager).loads(clock.now_seconds()) == total)
    # The first of these was perhaps on its way before.
    for front, count in zip(fronts, heard, strict=True):
        await until(lambda front=front, count=count: len(front.rosters) >= count + 2)  # type: ignore[misc]


async def test_roles_follow_the_load_of_all_fronts_together(
    instance_command: CommandFactory,
) -> None:
    clock = VirtualClock()
    async with one_front(instance_command(), COUNTS, clock=clock, adaptive_roles=True) as (
        one,
        front,
    ):
        for _ in range(20):
            await second(one, clock, front, prompts=HALF)
        assert front.roster.role_changes == 0, "what one front has asks for no change"
        async with await joined(one.manager, "front-b") as other:
            await other.serving(3)
            for _ in range(20):
                await second(one, clock, front, other, prompts=HALF)
            for told in (front, other):
                assert told.roster.role_changes == 1
                assert sorted(roles(told).values()) == ["decode", "prefill", "prefill"]
                assert set(told.states().values()) == {"serving"}
                assert roles(told)["prefill-0"] == "prefill"


async def test_roles_stay_where_nobody_asked_for_others(instance_command: CommandFactory) -> None:
    clock = VirtualClock()
    async with one_front(instance_command(), COUNTS, clock=clock) as (one, front):
        for _ in range(12):
            await second(one, clock, front, prompts=90_000)
        assert front.roster.role_changes == 0
        assert roles(front) == {
            "prefill-0": "prefill",
            "decode-0": "decode",
            "decode-1": "decode",
        }


async def test_a_manager_that_comes_later_learns_the_roles_from_a_front(
    instance_command: CommandFactory,
) -> None:
    clock = VirtualClock()
    async with one_front(instance_command(), COUNTS, clock=clock, adaptive_roles=True) as (
        one,
        front,
    ):
        while not front.roster.role_changes:
            await second(one, clock, front, prompts=20_000)
        changed, first = roles(front), front.roster
        known = beat(front, 20_000)
    async with two_fronts(instance_command(), COUNTS, adaptive_roles=True) as (one, front, other):
        assert front.roster.manager != first.manager and front.roster.role_changes == 0
        assert roles(front) != changed
        front.say(known)
        for told in (front, other):
            await until(lambda told=told: told.roster.role_changes == 1)  # type: ignore[misc]
            assert roles(told) == changed
        other.say(FrontBeat({}, {"prefill-0": "decode"}, 1))
        other.say(FrontBeat({"decode-0": 7}, {}, 0))
        await until(lambda: loads_of(one.manager).get("decode-0") == 7)
        assert roles(front) == changed, "who knows no more is not believed"


async def test_an_instance_that_comes_in_place_of_one_that_is_gone_has_its_first_role(
    instance_command: CommandFactory,
) -> None:
    async with one_front(instance_command(), COUNTS) as (_, front):
        front.say(FrontBeat({}, {"decode-1": "prefill"}, 4))
        await until(lambda: roles(front)["decode-1"] == "prefill")
        assert not (await front.drain("decode-1")).field
        await front.serving(2)
        assert not (await front.scale({"decode": 2})).field
        await front.serving(3)
        assert roles(front)["decode-1"] == "decode"
