"""Several instances behind one front: who gets what, and what each other's ends do to requests."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.fleet.fleet import MemberStatus
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.front.front import Front
from kvell.testing.instance import CRASH_TOKEN, fake_token
from tests.engine.works import spec_of
from tests.front.scenarios import damage_next_bytes, is_gone, line_of, until
from tests.front.seen import own_members_of, queue_of

CommandFactory = Callable[..., list[str]]
Ids = NDArray[np.int32]
LIMITS = FrontLimits(
    max_waiting=64, drain_seconds=20, silence_seconds=2.0, restart=RestartPolicy(0.01, 0.05, 3)
)
STREAMS = 9
LONG = SamplingParams(max_tokens=400)


def start_with(front: Front, command: list[str]) -> None:
    own_members_of(front)._command = tuple(command)


async def answer(front: Front, prompt: Ids, sampling: SamplingParams = LONG) -> Finished:
    """Serve a prompt, and check every token that came."""
    tokens: list[int] = []
    async for output in front.generate(spec_of(prompt, sampling)):
        tokens += output.token_ids
        if output.finished is not None:
            end = output.finished
    assert tokens == [fake_token(prompt.astype("<i4").tobytes(), i) for i in range(len(tokens))]
    if end.reason == "length":
        assert len(tokens) == sampling.max_tokens
    return end


def prompts(count: int = STREAMS) -> list[Ids]:
    return [np.array([50 + n, 60 + n, 70 + n], np.int32) for n in range(count)]


def started(front: Front, count: int = STREAMS) -> list["asyncio.Task[Finished]"]:
    return [asyncio.create_task(answer(front, prompt)) for prompt in prompts(count)]


def by_id(front: Front) -> dict[str, MemberStatus]:
    return {status.instance_id: status for status, _ in front.instances()}


def in_flight(front: Front) -> dict[str, int]:
    return {status.instance_id: len(line.in_flight) for status, line in front.instances()}


def three(command: CommandFactory, *arguments: str) -> Front:
    slow = command("--step-seconds", "0.002", *arguments)
    return Front(slow, instances={"mixed": 3}, limits=LIMITS)


async def test_requests_are_spread_and_each_gets_its_own_tokens(
    instance_command: CommandFactory,
) -> None:
    async with three(instance_command) as front:
        tasks = started(front)
        await until(lambda: sum(in_flight(front).values()) == STREAMS)
        assert in_flight(front) == {"mixed-0": 3, "mixed-1": 3, "mixed-2": 3}
        assert {end.reason for end in await asyncio.gather(*tasks)} == {"length"}
        assert (front.waiting, front.in_flight) == (0, 0)
        assert set(await front.stats()) == {"mixed-0", "mixed-1", "mixed-2"}
        for _, line in front.instances():
            assert (line.outstanding_prompt_tokens, line.outstanding_output_tokens) == (0, 0)


async def test_incarnations_are_drawn_and_told(instance_command: CommandFactory) -> None:
    async with three(instance_command) as front:
        told = {status.report.facts.incarnation for status, _ in front.instances() if status.report}
        assert len(told) == 3
        assert told == {line.incarnation for _, line in front.instances()}


@pytest.mark.parametrize(
    "fault", ["kill", *(pytest.param(one, marks=pytest.mark.long) for one in ("stop", "damage"))]
)
async def test_an_instance_that_fails_takes_no_request_with_it(
    instance_command: CommandFactory, fault: str
) -> None:
    async with three(instance_command) as front:
        tasks = started(front)
        await until(lambda: in_flight(front)["mixed-1"] == 3)
        pid = by_id(front)["mixed-1"].pid
        assert pid is not None
        if fault == "damage":
            await damage_next_bytes(line_of(front, "mixed-1"), Random(0)).wait()
        else:
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        await until(lambda: by_id(front)["mixed-1"].state == "restarting")
        assert is_gone(pid)
        ends = await asyncio.gather(*tasks)
        assert {end.reason for end in ends} == {"length"}
        assert sorted(end.attempt for end in ends) == [0] * 6 + [1] * 3
        await until(lambda: by_id(front)["mixed-1"].state == "serving")
        assert by_id(front)["mixed-1"].restarts == 1
        assert by_id(front)["mixed-1"].pid != pid
        assert [by_id(front)[name].restarts for name in ("mixed-0", "mixed-2")] == [0, 0]
        for stats in (await front.stats()).values():
            assert (stats.running, stats.waiting) == (0, 0)


async def test_others_go_on_before_the_dead_one_is_back(instance_command: CommandFactory) -> None:
    slow_restart = FrontLimits(restart=RestartPolicy(first_seconds=30.0))
    command = instance_command("--step-seconds", "0.002")
    async with Front(command, instances={"mixed": 2}, limits=slow_restart) as front:
        tasks = started(front, 4)
        await until(lambda: in_flight(front) == {"mixed-0": 2, "mixed-1": 2})
        pid = by_id(front)["mixed-0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ends = await asyncio.gather(*tasks)
        assert by_id(front)["mixed-0"].state == "restarting"
        assert front.state == "serving"
        assert sorted(end.attempt for end in ends) == [0, 0, 1, 1]


async def test_a_request_that_kills_two_instances_is_not_tried_on_a_third(
    instance_command: CommandFactory,
) -> None:
    async with three(instance_command) as front:
        tasks = started(front)
        poison = np.array([CRASH_TOKEN, 9], np.int32)
        end = await answer(front, poison)
        assert end.reason == "error"
        assert "two instances ended" in end.message
        assert {one.reason for one in await asyncio.gather(*tasks)} == {"length"}
        assert sum(status.restarts for status, _ in front.instances()) <= 2
        await until(lambda: all(s.state == "serving" for s in by_id(front).values()))
        assert sum(status.restarts for status, _ in front.instances()) == 2


async def test_scaling_up_and_down_under_load_loses_nothing(
    instance_command: CommandFactory,
) -> None:
    command = instance_command("--step-seconds", "0.002")
    async with Front(command, instances={"mixed": 1}, limits=LIMITS) as front:
        tasks = started(front, 6)
        await until(lambda: in_flight(front) == {"mixed-0": 6})
        await front.scale({"mixed": 2})
        assert by_id(front)["mixed-1"].state == "starting"
        await until(lambda: by_id(front)["mixed-1"].state == "serving")
        tasks += [asyncio.create_task(answer(front, prompt)) for prompt in prompts(2)]
        await until(lambda: in_flight(front)["mixed-1"] >= 1)
        await front.drain("mixed-0")
        assert front.state == "serving"
        await until(lambda: "mixed-0" not in by_id(front))
        tasks += [asyncio.create_task(answer(front, prompt)) for prompt in prompts(2)]
        ends = await asyncio.gather(*tasks)
        assert {end.reason for end in ends} == {"length"}
        assert {end.attempt for end in ends} == {0}
        await front.scale({"mixed": 3})
        await until(lambda: [s.state for s in by_id(front).values()] == ["serving"] * 3)
        await front.scale({"mixed": 1})
        await until(lambda: len(by_id(front)) == 1)
        assert (await answer(front, prompts(1)[0])).reason == "length"


async def test_what_outlasts_a_drain_goes_on_elsewhere_and_counts_as_no_death(
    instance_command: CommandFactory,
) -> None:
    limits = FrontLimits(drain_seconds=0.05)
    command = instance_command("--step-seconds", "0.002")
    async with Front(command, instances={"mixed": 2}, limits=limits) as front:
        tasks = started(front, 4)
        await until(lambda: in_flight(front) == {"mixed-0": 2, "mixed-1": 2})
        await front.drain("mixed-1")
        await until(lambda: "mixed-1" not in by_id(front))
        moved = list(queue_of(front).line("mixed-0").in_flight.values())
        assert sorted(entry.attempts.deaths for entry in moved) == [0, 0, 0, 0]
        ends = await asyncio.gather(*tasks)
        assert sorted(end.attempt for end in ends) == [0, 0, 1, 1]


async def test_the_last_and_the_unknown_are_not_drained(instance_command: CommandFactory) -> None:
    async with Front(instance_command()) as front:
        with pytest.raises(ChangeSomething, match="is the last one that serves"):
            await front.drain("mixed-0")
        with pytest.raises(ChangeSomething, match="id=mixed-7: is not an instance"):
            await front.drain("mixed-7")
        assert front.state == "serving"


async def test_an_instance_that_cannot_start_fails_alone(instance_command: CommandFactory) -> None:
    async with Front(instance_command()) as front:
        start_with(front, instance_command("--exit-at-start", "2"))
        await front.scale({"mixed": 2})
        await until(lambda: by_id(front)["mixed-1"].state == "failed")
        assert front.state == "serving"
        assert (await answer(front, prompts(1)[0])).reason == "length"
        await front.scale({"mixed": 1})
        await until(lambda: set(by_id(front)) == {"mixed-0"})


@pytest.mark.long
async def test_what_outlasts_a_drain_ends_if_no_other_instance_can_start(
    instance_command: CommandFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has failed since the drain began; then the loop's time passes at once."""
    limits = FrontLimits(drain_seconds=60.0, restart=RestartPolicy(0.01, 0.01, 3))
    loop = asyncio.get_running_loop()
    now = loop.time
    command = instance_command("--step-seconds", "0.1")
    async with Front(command, instances={"mixed": 2}, limits=limits) as front:
        tasks = started(front, 2)
        await until(lambda: in_flight(front) == {"mixed-0": 1, "mixed-1": 1})
        start_with(front, instance_command("--exit-at-start", "2"))
        await front.drain("mixed-1")
        pid = by_id(front)["mixed-0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: by_id(front)["mixed-0"].state == "failed")
        assert by_id(front)["mixed-1"].state == "draining"
        monkeypatch.setattr(loop, "time", lambda: now() + limits.drain_seconds)
        ends = await asyncio.gather(*tasks)
        assert {end.reason for end in ends} == {"error"}
        assert {end.message for end in ends} == {"the instance cannot be restarted"}


async def test_sessions_stay_with_their_instance(instance_command: CommandFactory) -> None:
    command = instance_command("--step-seconds", "0.001")
    async with Front(command, instances={"mixed": 3}, routing="session") as front:

        async def turn(session: str) -> str:
            prompt = np.array([70, 80 + len(session)], np.int32)
            async with aclosing(front.generate(spec_of(prompt, LONG, session=session))) as outputs:
                await anext(outputs)
                [home] = [name for name, count in in_flight(front).items() if count]
            await until(lambda: not any(in_flight(front).values()))
            return home

        homes = {name: {await turn(name) for _ in range(3)} for name in map(str, range(12))}
        assert all(len(home) == 1 for home in homes.values())
        assert len(set.union(*homes.values())) > 1


@pytest.mark.long
async def test_an_instance_that_is_told_to_end_by_others_costs_no_request(
    instance_command: CommandFactory,
) -> None:
    async with three(instance_command) as front:
        tasks = started(front)
        await until(lambda: in_flight(front)["mixed-1"] == 3)
        pid = by_id(front)["mixed-1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        while by_id(front)["mixed-1"].restarts == 0:
            if front.waiting < 8:
                tasks += started(front, 2)
            await asyncio.sleep(0.02)
        assert {end.reason for end in await asyncio.gather(*tasks)} == {"length"}
