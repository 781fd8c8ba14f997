"""The instances that leave, and questions about pages: shared, in order, bounded."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Command, Finished
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething, InstanceDied, TryLater
from kvell.fleet.fleet import InstanceState
from kvell.fleet.followed.followed_members import FollowedCluster, ManagerAddress
from kvell.fleet.instance.watch import MOST_QUESTIONS, Watch, pages_of
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.started.members import MOST_RESTARTS, Candidate, Members, scaling
from kvell.fleet.started.supervisor import RestartPolicy, Watchdog
from kvell.front.front import Front
from kvell.testing.instance import LARGE_PAGES
from tests.depth import many
from tests.engine.works import spec_of
from tests.fleet.manager.front_client import QUICK, SECRET, managed
from tests.fleet.placing.conftest import WORDS
from tests.fleet.placing.host_placement import HostPlacement
from tests.fleet.seen import members_of
from tests.front.scenarios import run, until
from tests.front.seen import own_members_of

CommandFactory = Callable[..., list[str]]
Fleet = tuple[Front, Members]
"""A front, and the instances by the process that starts them."""
MakeFleet = Callable[..., AbstractAsyncContextManager[Fleet]]
STAYING = tuple(state for state in get_args(InstanceState) if state not in ("draining", "gone"))
SERVING, QUIET = Candidate("", "serving"), Candidate("", "serving", answers=False)
STARTING, RESTARTING = Candidate("", "starting"), Candidate("", "restarting")
SLOW_RESTARTS = replace(QUICK, restart=RestartPolicy(first_seconds=30.0))


def leaving(count: int, *candidates: Candidate) -> set[str]:
    return set(scaling(candidates, count).leaving)


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.just(""),
        st.sampled_from(STAYING),
        st.booleans(),
        st.integers(0, 9),
        st.floats(0, 100),
    ),
    max_size=8,
).map(lambda made: [each._replace(instance_id=str(n)) for n, each in enumerate(made)])


@many()
@given(CANDIDATES, st.integers(1, 8))
def test_as_many_stay_that_serve_as_the_number_allows(
    candidates: list[Candidate], count: int
) -> None:
    change = scaling(candidates, count)
    stay = [each for each in candidates if each.instance_id not in change.leaving]
    assert len(stay) + change.num_new == count
    assert "failed" not in {each.state for each in stay}
    for kinds in ({"serving"}, {"serving", "starting", "restarting"}):
        before = sum(each.state in kinds for each in candidates)
        assert sum(each.state in kinds for each in stay) == min(before, count)
    answering = sum(each.state == "serving" and each.answers for each in candidates)
    kept = sum(each.state == "serving" and each.answers for each in stay)
    assert kept == min(answering, count)


def test_of_instances_that_are_alike_the_youngest_leave() -> None:
    for state in ("serving", "starting", "restarting", "failing"):
        alike = [Candidate(name, state) for name in "abc"]
        assert leaving(1, *alike) == {"b", "c"}


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (RESTARTING, SERVING),
        (QUIET, SERVING),
        (RESTARTING._replace(starting_seconds=9.0), QUIET),
        (SERVING._replace(restarts_in_vain=MOST_RESTARTS + 1), SERVING),
        (QUIET, SERVING._replace(restarts_in_vain=MOST_RESTARTS + 1)),
        (RESTARTING, STARTING._replace(starting_seconds=0.1)),
        (STARTING._replace(starting_seconds=1.0), RESTARTING._replace(starting_seconds=2.0)),
        (Candidate("", "failing", starting_seconds=9.0), STARTING),
        (Candidate("", "failed"), Candidate("", "failing")),
    ],
)
def test_the_older_leaves_if_the_younger_serves_sooner(worse: Candidate, better: Candidate) -> None:
    worse, better = worse._replace(instance_id="a"), better._replace(instance_id="b")
    assert leaving(1, worse, better) == {"a"}
    assert leaving(1, better, worse) == {"a"}
    assert scaling([worse, better], 2).num_new == (worse.state == "failed")


def test_an_instance_is_quiet_after_some_heartbeats_were_missed() -> None:
    watchdog = Watchdog(16 * HEARTBEAT_SECONDS)  # a look for every two heartbeats
    assert not watchdog.is_quiet
    quiet = []
    for _ in range(4):
        watchdog.look()
        quiet.append(watchdog.is_quiet)
    assert quiet == [False, False, True, True]
    watchdog.beat()
    assert not watchdog.is_quiet


# ---------------------------------------------------------------------------- with real processes


@asynccontextmanager
async def own(command: CommandFactory, number: int, restart: RestartPolicy) -> AsyncIterator[Fleet]:
    limits = replace(SLOW_RESTARTS, restart=restart)
    async with Front(command(), instances={"mixed": number}, limits=limits) as front:
        yield front, own_members_of(front)


@asynccontextmanager
async def followed(
    _command: CommandFactory, number: int, restart: RestartPolicy
) -> AsyncIterator[Fleet]:
    """A front of a cluster, whose manager starts the instances."""
    limits = replace(SLOW_RESTARTS, restart=restart)
    site = ClusterSite(HostPlacement(SECRET), SECRET, "kvell-test", 20)
    async with managed(WORDS, {"mixed": number}, limits=limits, site=site) as its:

        async def find() -> ManagerAddress:
            return ManagerAddress(its.manager.address, SECRET, "")

        async with Front(joins=FollowedCluster(find, ends_cluster=True), limits=limits) as front:
            yield front, members_of(its.manager)


FLEETS = pytest.mark.parametrize("fleet", [own, followed])


def states(front: Front) -> dict[str, str]:
    return {status.instance_id: status.state for status, _ in front.instances()}


def send(front: Front, instance_id: str, number: int) -> None:
    pids = {status.instance_id: status.pid for status, _ in front.instances()}
    pid = pids[instance_id]
    assert pid is not None
    os.kill(pid, number)


def serve(front: Front, members: Members, instance_id: str) -> bool:
    return states(front)[instance_id] == "serving" or members[instance_id].supervisor.answers


async def answer(front: Front) -> Finished:
    """Serve a request; an error says that no instance serves."""
    prompt = np.array([60, 61], np.int32)
    async for output in front.generate(spec_of(prompt, SamplingParams(max_tokens=3))):
        if output.finished is not None:
            return output.finished
    raise AssertionError("it has no end")


@FLEETS
async def test_the_one_that_serves_stays_and_the_one_that_restarts_leaves(
    instance_command: CommandFactory, fleet: MakeFleet
) -> None:
    async with fleet(instance_command, 2, SLOW_RESTARTS.restart) as (front, members):
        send(front, "mixed-0", signal.SIGKILL)
        await until(lambda: not members["mixed-0"].supervisor.answers)
        await until(lambda: states(front)["mixed-0"] == "restarting")
        named = r"last one that serves; wait until .*: mixed-0 \((restarting|does not answer)\)"
        with pytest.raises(ChangeSomething, match=named):
            await front.drain("mixed-1")
        assert states(front) == {"mixed-0": "restarting", "mixed-1": "serving"}
        await front.scale({"mixed": 1})
        await until(lambda: states(front) == {"mixed-1": "serving"})
        assert (await answer(front)).reason == "length"
        with pytest.raises(ChangeSomething, match="last one that serves; add one first"):
            await front.drain("mixed-1")


async def test_one_that_restarts_is_not_drained_while_none_serves(
    instance_command: CommandFactory,
) -> None:
    async with own(instance_command, 2, SLOW_RESTARTS.restart) as (front, _):
        for name in ("mixed-0", "mixed-1"):
            send(front, name, signal.SIGKILL)
        await until(lambda: set(states(front).values()) == {"restarting"})
        named = "cannot be drained while no other instance serves; wait until .*: mixed-1"
        with pytest.raises(ChangeSomething, match=named):
            await front.drain("mixed-0")
        await front.scale({"mixed": 1})
        await until(lambda: states(front) == {"mixed-0": "restarting"})


@pytest.mark.long
@FLEETS
async def test_one_that_no_longer_answers_leaves_before_one_that_does(
    instance_command: CommandFactory, fleet: MakeFleet
) -> None:
    """It counts as serving until its silence has lasted for its deadline."""
    async with fleet(instance_command, 2, SLOW_RESTARTS.restart) as (front, members):
        send(front, "mixed-0", signal.SIGSTOP)
        supervisor = members["mixed-0"].supervisor
        await until(lambda: not supervisor.answers)
        assert supervisor.state == "serving"
        with pytest.raises(ChangeSomething, match=r"last .*: mixed-0 \(does not answer\)"):
            await front.drain("mixed-1")
        await front.scale({"mixed": 1})
        await until(lambda: set(states(front)) == {"mixed-1"})
        assert (await answer(front)).reason == "length"


SCALE_DOWNS, NUMBER = 30, 3
RESTART_SECONDS = 0.3


@pytest.mark.long
@pytest.mark.timeout(400)
@FLEETS
def test_one_serves_after_each_scale_down_at_a_random_moment_of_restarts(
    instance_command: CommandFactory, fleet: MakeFleet
) -> None:
    """Requests are sent without a pause, and each is answered."""
    chance = Random(77)
    restarts = RestartPolicy(RESTART_SECONDS / 2, RESTART_SECONDS / 2, attempts=1000)

    async def requests(front: Front, answered: list[str]) -> None:
        while True:
            answered.append((await answer(front)).reason)
            await asyncio.sleep(0.005)

    async def scenario() -> None:
        done = 0
        async with fleet(instance_command, NUMBER, restarts) as (front, members):
            answered: list[str] = []
            asking = asyncio.create_task(requests(front, answered))
            while done < SCALE_DOWNS:
                killed = chance.sample(sorted(states(front)), chance.randint(1, NUMBER - 1))
                for name in killed:
                    send(front, name, signal.SIGKILL)
                # Over two connections: the manager may receive the order before the end.
                await until(lambda killed=killed: not any(serve(front, members, n) for n in killed))  # type: ignore[misc]
                await asyncio.sleep(chance.uniform(0, RESTART_SECONDS))
                happened = "restarting" in states(front).values()
                count = chance.randint(1, NUMBER - 1)
                await front.scale({"mixed": count})
                await until(lambda count=count: len(states(front)) == count)  # type: ignore[misc]
                assert "serving" in states(front).values()
                done += happened
                seen = len(answered)
                await until(lambda seen=seen: len(answered) > seen or asking.done())  # type: ignore[misc]
                await front.scale({"mixed": NUMBER})
                await until(lambda: list(states(front).values()) == ["serving"] * NUMBER)
            assert not asking.done(), asking.exception()
            asking.cancel()
            assert set(answered) == {"length"}

    run(scenario(), 380)


SECONDS = 5.0
AT_ONCE = 0.01
PAGES = Pages(1, 2)


class Sent:
    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.watch = Watch(self.commands.append)


async def test_whoever_asks_the_same_shares_one_answer() -> None:
    sent = Sent()
    asked = [asyncio.create_task(sent.watch.pages(SECONDS)) for _ in range(5)]
    await asyncio.sleep(0)
    sent.watch.on_answer(PAGES)
    assert await asyncio.gather(*asked) == [PAGES] * 5
    assert sent.commands == [AskPages()]


async def test_answers_go_to_those_who_asked_in_order() -> None:
    sent = Sent()
    pages = asyncio.create_task(sent.watch.pages(SECONDS))
    numbers = [asyncio.create_task(sent.watch.large_page(n, SECONDS)) for n in (3, 8, 3)]
    await asyncio.sleep(0)
    assert sent.commands == [AskPages(), AskLargePage(3), AskLargePage(8)]
    for answer in (PAGES, LargePage(3, 1), LargePage(8, 1)):
        sent.watch.on_answer(answer)
    assert await pages == PAGES
    assert [(await one).large_page for one in numbers] == [3, 8, 3]


async def test_what_nobody_asked_for_is_dropped() -> None:
    sent = Sent()
    sent.watch.on_answer(PAGES)
    asked = asyncio.create_task(sent.watch.large_page(3, SECONDS))
    await asyncio.sleep(0)
    sent.watch.on_answer(LargePage(4, 1))
    sent.watch.on_answer(PAGES)
    sent.watch.on_answer(LargePage(3, 1))
    assert await asked == LargePage(3, 1)


async def test_a_silent_instance_is_waited_for_only_so_long_and_not_asked_twice() -> None:
    sent = Sent()
    for _ in range(3):
        with pytest.raises(TryLater, match="no pages within"):
            await sent.watch.pages(AT_ONCE)
    assert sent.commands == [AskPages()]
    later = asyncio.create_task(sent.watch.pages(SECONDS))
    await asyncio.sleep(0)
    sent.watch.on_answer(PAGES)
    assert await later == PAGES


async def test_only_so_many_questions_wait() -> None:
    sent = Sent()
    for number in range(MOST_QUESTIONS):
        with pytest.raises(TryLater, match="no pages within"):
            await sent.watch.large_page(number, AT_ONCE)
    with pytest.raises(TryLater, match="too many questions to the instance"):
        await sent.watch.large_page(MOST_QUESTIONS, AT_ONCE)
    assert len(sent.commands) == MOST_QUESTIONS


async def test_nobody_waits_for_a_dead_instance() -> None:
    sent = Sent()
    asked = asyncio.create_task(sent.watch.pages(SECONDS))
    await asyncio.sleep(0)
    sent.watch.lost("it was killed")
    with pytest.raises(InstanceDied, match="it was killed"):
        await asked
    again = asyncio.create_task(sent.watch.pages(SECONDS))
    await asyncio.sleep(0)
    sent.watch.on_answer(PAGES)
    assert await again == PAGES
    assert sent.commands == [AskPages()] * 2


async def test_instances_that_are_silent_are_left_out() -> None:
    heard, silent = Sent(), Sent()
    asked = asyncio.create_task(pages_of([("a", heard.watch), ("b", silent.watch)], 0.2))
    await until(lambda: bool(heard.commands and silent.commands))
    heard.watch.on_answer(PAGES)
    assert await asked == {"a": PAGES}


async def test_a_bug_is_not_taken_for_silence() -> None:
    def broken(_command: Command) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await pages_of([("a", Watch(broken))], SECONDS)


async def test_a_front_shows_what_its_instances_have(instance_command: CommandFactory) -> None:
    command = instance_command("--step-seconds", "0.01")
    async with Front(command, instances={"mixed": 2}) as front:
        empty = await front.pages(SECONDS)
        assert sorted(empty) == ["mixed-0", "mixed-1"]
        used = [np.frombuffer(one.used, "<u4").tolist() for one in empty.values()]
        assert used == [[0] * LARGE_PAGES] * 2
        outputs = front.generate(
            spec_of(
                np.array([70, 71, 72], np.int32),
                SamplingParams(max_tokens=500),
                request_id="mine",
            )
        )
        await anext(outputs)
        (entry,), waiting, *_ = front.entries()
        assert entry.request_id == "mine" and waiting == []
        assert entry.first_token_seconds is not None
        shown = await front.large_page(entry.line, 0, SECONDS)
        assert shown is not None
        assert [owner.request_id for owner in shown.owners] == ["mine"]
        assert await front.large_page("nobody", 0, SECONDS) is None
        await outputs.aclose()


async def test_a_front_whose_instance_dies_goes_on_to_show(
    instance_command: CommandFactory,
) -> None:
    async with Front(instance_command()) as front:
        (status, _), *_ = front.instances()
        assert status.pid is not None
        os.kill(status.pid, signal.SIGSTOP)
        asked = asyncio.create_task(front.pages(SECONDS))
        await asyncio.sleep(0.05)
        os.kill(status.pid, signal.SIGKILL)
        assert await asked == {}
        await until(lambda: front.state == "serving")
        assert list(await front.pages(SECONDS)) == ["mixed-0"]
