"""A front of a cluster: requests over instances that a manager names, and their roles."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished, Migrate, Submit
from kvell.engine.protocol.pooling import POOLED
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.fleet.followed import instance_link
from kvell.fleet.manager.messages import Ended, FrontBeat, Leave
from kvell.front.front import Front
from tests.engine.works import spec_of
from tests.fleet.followed.scripted_cluster import (
    LIMITS,
    PROMPT,
    ScriptedInstance,
    ScriptedManager,
    cluster,
    cut,
    ended,
    finish_of,
    in_flight,
    joined,
    states,
)
from tests.front.scenarios import until
from tests.front.seen import queue_of


def started(front: Front, count: int, max_tokens: int = 300) -> list["asyncio.Task[Finished]"]:
    prompts = [np.array([50 + n, 60 + n], np.int32) for n in range(count)]
    return [asyncio.create_task(finish_of(front, max_tokens, one)) for one in prompts]


def two(**settings: float) -> tuple[ScriptedInstance, ScriptedInstance]:
    return ScriptedInstance("mixed-0", 11, **settings), ScriptedInstance("mixed-1", 12, **settings)


async def test_requests_are_spread_over_the_instances_of_the_roster() -> None:
    one, other = two()
    async with cluster(one, other) as (manager, front):
        assert front.state == "serving"
        tasks = started(front, 6)
        await until(lambda: in_flight(front) == {"mixed-0": 3, "mixed-1": 3})
        ends = await asyncio.gather(*tasks)
        assert {(end.reason, end.attempt) for end in ends} == {("length", 0)}
        [told, _] = [status for status, _ in front.instances()]
        assert (told.host, told.pid, told.pid_here) == ("10.0.0.1", 77, None)
        assert told.report is not None and told.report.facts.incarnation == 11
        assert set(await front.stats()) == {"mixed-0", "mixed-1"}
        [greeting] = manager.fronts
        assert greeting.instance.startswith("front-")
    assert isinstance(manager.heard[-1], Leave)


async def test_a_cut_line_costs_no_token_and_the_same_incarnation_serves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manager knows nothing of it, so after a while nobody is blamed."""
    monkeypatch.setattr(instance_link, "NEWS_SECONDS", 0.05)
    one, other = two()
    async with cluster(one, other) as (_, front):
        tasks = started(front, 2)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
        [lost] = queue_of(front).line("mixed-0").in_flight.values()
        cut(front, "mixed-0")
        await until(lambda: states(front)["mixed-0"] == "restarting")
        await until(lambda: states(front)["mixed-0"] == "serving")
        assert (lost.attempts.deaths, lost.attempts.alone) == (1, 0)
        ends = await asyncio.gather(*tasks)
        assert sorted((end.attempt, end.reason) for end in ends) == [
            (0, "length"),
            (1, "length"),
        ]
        assert front.instances()[0][1].incarnation == 11
        tasks = started(front, 4)
        await until(lambda: in_flight(front)["mixed-0"] > 0)
        assert {end.reason for end in await asyncio.gather(*tasks)} == {"length"}


async def test_nothing_goes_to_an_instance_whose_line_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the front waits for news, what it had waits too, and new requests go elsewhere."""
    monkeypatch.setattr(instance_link, "NEWS_SECONDS", 600.0)
    one, other = two()
    async with cluster(one, other) as (manager, front):
        tasks = started(front, 2)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
        cut(front, "mixed-0")
        await until(lambda: states(front)["mixed-0"] == "restarting")
        tasks += started(front, 3)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 4})
        entry = one.entry(state="restarting", ended=Ended(11, "it was killed", "killed"))
        manager.tell(entry, other.entry())
        ends = await asyncio.gather(*tasks)
        assert [end.attempt for end in ends] == [1, 0, 0, 0, 0]


async def test_the_roster_says_how_an_instance_ended_and_names_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = two()
    again = ScriptedInstance("mixed-0", 13)
    with ended(again):
        async with cluster(one, other) as (manager, front):
            tasks = started(front, 2)
            await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
            [lost] = queue_of(front).line("mixed-0").in_flight.values()
            one.end()
            crash = Ended(11, "the instance process ended unexpectedly (exit 1)", "crash")
            manager.tell(one.entry(state="restarting", ended=crash), other.entry())
            await until(lambda: lost.attempts.deaths == 1)
            assert lost.attempts.alone == 1
            named = again.entry(restarts=1, ended=crash)
            manager.tell(named, other.entry())
            await until(lambda: states(front)["mixed-0"] == "serving")
            told, line = front.instances()[0]
            assert (told.restarts, line.incarnation) == (1, 13)
            ends = await asyncio.gather(*tasks)
            assert sorted(end.attempt for end in ends) == [0, 1]
    assert "ended unexpectedly (exit 1)" in caplog.text


async def test_another_incarnation_ends_the_line_at_once() -> None:
    """The manager has given the old one up, which this front still reached."""
    one, other = two()
    again = ScriptedInstance("mixed-0", 13)
    with ended(again):
        async with cluster(one, other) as (manager, front):
            tasks = started(front, 2)
            await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
            hung = Ended(11, "it was silent", "hung")
            manager.tell(again.entry(restarts=1, ended=hung), other.entry())
            await until(lambda: front.instances()[0][1].incarnation == 13)
            assert sorted([(await task).attempt for task in tasks]) == [0, 1]
            await until(lambda: one.engine.finished == {"cancelled": 1})


async def test_an_instance_that_drains_gets_nothing_new_and_goes() -> None:
    one, other = two()
    async with cluster(one, other) as (manager, front):
        tasks = started(front, 2)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
        manager.tell(one.entry(state="draining"), other.entry())
        await until(lambda: states(front)["mixed-0"] == "draining")
        tasks += started(front, 3)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 4})
        ends = await asyncio.gather(*tasks)
        assert {end.attempt for end in ends} == {0}
        manager.tell(other.entry())
        await until(lambda: list(states(front)) == ["mixed-1"])
        assert (await finish_of(front, 5)).reason == "length"


@pytest.mark.parametrize("end", ["the line ends first", "the roster drops it first"])
async def test_what_outlasts_a_drain_goes_on_elsewhere_and_counts_as_no_death(end: str) -> None:
    one, other = two()
    async with cluster(one, other) as (manager, front):
        tasks = started(front, 2, 500)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
        [entry] = queue_of(front).line("mixed-0").in_flight.values()
        manager.tell(one.entry(state="draining"), other.entry())
        await until(lambda: states(front)["mixed-0"] == "draining")
        if end == "the line ends first":
            one.end()
            await until(lambda: entry.line == "mixed-1")
        manager.tell(other.entry())
        await until(lambda: list(states(front)) == ["mixed-1"])
        assert (entry.line, entry.attempts.deaths) == ("mixed-1", 0)
        ends = await asyncio.gather(*tasks)
        assert sorted(end.attempt for end in ends) == [0, 1]


async def test_an_instance_that_the_manager_added_is_used() -> None:
    one, other = two()
    with ended(other):
        async with cluster(one) as (manager, front):
            starting = other.entry(state="starting", address="", incarnation=0, pid=0)
            manager.tell(one.entry(), starting)
            await until(lambda: list(states(front).values()) == ["serving", "starting"])
            manager.tell(one.entry(), other.entry())
            await until(lambda: states(front)["mixed-1"] == "serving")
            tasks = started(front, 4)
            await until(lambda: in_flight(front)["mixed-1"] > 0)
            assert {end.reason for end in await asyncio.gather(*tasks)} == {"length"}


async def test_a_silent_line_is_ended_and_dialed_again(caplog: pytest.LogCaptureFixture) -> None:
    one = ScriptedInstance("mixed-0", 11, heartbeat_seconds=3600.0)
    other = ScriptedInstance("mixed-1", 12, heartbeat_seconds=0.05)
    limits = replace(LIMITS, silence_seconds=0.4)
    async with cluster(one, other, limits=limits) as (manager, front):
        await until(lambda: states(front)["mixed-0"] == "restarting")
        hung = Ended(11, "it sent nothing, says the manager", "hung")
        manager.tell(one.entry(state="restarting", ended=hung), other.entry())
        await until(lambda: "says the manager" in caplog.text)
        assert states(front)["mixed-1"] == "serving"


async def test_names_of_requests_are_the_fronts_own_on_the_wire_and_not_for_people() -> None:
    one = ScriptedInstance("mixed-0", 11)
    with ended(one):
        async with (
            ScriptedManager(one.entry()) as manager,
            joined(manager) as front,
            joined(manager) as second,
        ):
            same = [finish_of(each, 30, request_id="mine") for each in (front, second)]
            ends = await asyncio.gather(*same)
            assert [end.request_id for end in ends] == ["mine", "mine"]
            assert set(one.engine.asked()) == {f"{f.instance}:mine" for f in manager.fronts}
            outputs = front.generate(
                spec_of(PROMPT, SamplingParams(max_tokens=3000), request_id="it")
            )
            await anext(outputs)
            [entry] = front.entries().in_flight
            assert entry.shown_id == "it"
            page = await front.large_page("mixed-0", 0, 5.0)
            assert page is not None and [owner.request_id for owner in page.owners] == ["it"]
            foreign = await second.large_page("mixed-0", 0, 5.0)
            assert foreign is not None
            assert foreign.owners[0].request_id == entry.request_id
            with pytest.raises(ChangeSomething, match=r"^request_id=it: is in use"):
                await anext(front.generate(spec_of(PROMPT, SamplingParams(), request_id="it")))
            front.stop("it")
            rest = [output async for output in outputs]
            assert rest[-1].finished is not None and rest[-1].finished.reason == "stop"


async def test_a_front_that_closes_lets_its_requests_end() -> None:
    one, other = two()
    async with cluster(one, other) as (manager, front):
        tasks = started(front, 4, 100)
        await until(lambda: front.in_flight == 4)
    assert {(await task).reason for task in tasks} == {"length"}
    assert isinstance(manager.heard[-1], Leave)


async def test_what_outlasts_the_deadline_of_closing_ends_with_an_error() -> None:
    one, limits = ScriptedInstance("mixed-0", 11), replace(LIMITS, drain_seconds=0.05)
    with ended(one):
        async with ScriptedManager(one.entry()) as manager, joined(manager, limits) as front:
            [task] = started(front, 1, 4000)
            await until(lambda: front.in_flight == 1)
        end = await task
        assert (end.reason, end.message) == ("error", "the server is shutting down")
        await until(lambda: one.engine.finished == {"cancelled": 1})


async def test_another_fronts_load_moves_the_choice_of_least_load() -> None:
    """Both fronts see both instances idle of their own requests."""
    one, other = two(heartbeat_seconds=0.02, step_seconds=0.02)
    with ended(one, other):
        async with (
            ScriptedManager(one.entry()) as only_one,
            ScriptedManager(one.entry(), other.entry()) as manager,
            joined(only_one) as first,
            joined(manager) as second,
        ):
            prompt = np.arange(3, 3000, dtype=np.int32)
            running = first.generate(spec_of(prompt, POOLED, pooling="last"))
            task = asyncio.ensure_future(anext(running))
            line = queue_of(second).line("mixed-0")
            await until(lambda: line.outstanding_prompt_tokens == 2997)
            assert (line.running_requests, len(line.in_flight)) == (1, 0)
            for turn in range(3):
                await finish_of(second, 2, np.array([80 + turn], np.int32))
            assert (len(one.engine.asked()), len(other.engine.asked())) == (1, 3)
            await task
            await until(lambda: line.outstanding_prompt_tokens == 0)


def roles(front: Front) -> dict[str, str]:
    return {one.instance_id: line.role for one, line in front.instances()}


def last_beat(manager: ScriptedManager) -> FrontBeat:
    beats = manager.beats()
    return beats[-1] if beats else FrontBeat()


def three() -> list[ScriptedInstance]:
    names = ("prefill-0", "decode-0", "decode-1")
    return [ScriptedInstance(name, 20 + n, step_seconds=0.01) for n, name in enumerate(names)]


async def test_the_load_of_each_part_is_told() -> None:
    prefill, *decodes = three()
    async with cluster(prefill, *decodes) as (manager, front):
        await until(lambda: len(last_beat(manager).roles) == 3)
        beat = last_beat(manager)
        assert beat.roles == {name: name.partition("-")[0] for name in beat.roles}
        assert beat.loads == {"prefill-0": 0, "decode-0": 0, "decode-1": 0}
        prompt = np.arange(50, 2050, dtype=np.int32)
        outputs = front.generate(spec_of(prompt, SamplingParams(max_tokens=1), pooling="last"))
        task = asyncio.ensure_future(anext(outputs))
        await until(lambda: last_beat(manager).loads["prefill-0"] == 2000)
        await task
        await until(lambda: set(last_beat(manager).loads.values()) == {0})


async def test_a_changed_role_is_taken_over_and_what_is_there_leaves() -> None:
    prefill, one, other = three()
    async with cluster(prefill, one, other) as (manager, front):
        manager.tell(prefill.entry(role="decode"), one.entry(), other.entry(), role_changes=1)
        await until(lambda: roles(front)["prefill-0"] == "decode")
        task = asyncio.create_task(finish_of(front, 200))
        await until(lambda: front.in_flight == 1)
        [entry] = front.entries().in_flight
        busy = {each.name: each for each in (prefill, one, other)}[entry.line]
        entries = [
            each.entry(role="prefill" if each is busy else "decode")
            for each in (prefill, one, other)
        ]
        manager.tell(*entries, role_changes=2)
        await until(lambda: roles(front)[busy.name] == "prefill")
        await until(lambda: any(isinstance(each, Migrate) for each in busy.engine.heard))
        await until(lambda: last_beat(manager).role_changes == 2)
        assert last_beat(manager).roles[busy.name] == "prefill"
        assert (await task).reason == "length"


async def test_a_manager_that_knows_of_fewer_changes_changes_none() -> None:
    """It has just started; it takes over what the front says."""
    prefill, one, other = three()
    async with cluster(prefill, one, other) as (manager, front):
        manager.tell(prefill.entry(), one.entry(role="prefill"), other.entry(), role_changes=4)
        await until(lambda: roles(front)["decode-0"] == "prefill")
        manager.heard.clear()
        manager.tell(prefill.entry(), one.entry(), other.entry(), role_changes=0)
        await until(lambda: len(manager.beats()) > 2)
        assert roles(front)["decode-0"] == "prefill"
        assert last_beat(manager).role_changes == 4
        assert last_beat(manager).roles["decode-0"] == "prefill"
        manager.tell(prefill.entry(), one.entry(), other.entry(), role_changes=5)
        await until(lambda: roles(front)["decode-0"] == "decode")


async def test_prompts_go_to_those_that_compute_prompts_now() -> None:
    prefill, one, other = three()
    async with cluster(prefill, one, other) as (manager, front):
        manager.tell(
            prefill.entry(role="decode"),
            one.entry(role="prefill"),
            other.entry(),
            role_changes=2,
        )
        await until(lambda: roles(front)["decode-0"] == "prefill")
        assert (await finish_of(front, 5)).reason == "length"
        [submitted] = [each for each in one.engine.heard if isinstance(each, Submit)]
        assert submitted.goes_to in ("prefill-0", "decode-1")
        assert not prefill.engine.asked() and not other.engine.asked()
