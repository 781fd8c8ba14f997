"""Instances that machines keep, a manager and a front: deaths, cuts, silence, and lost machines."""

import asyncio
import logging
import os
import signal
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.testing.instance import fake_token
from tests.engine.works import spec_of
from tests.fleet.placing.conftest import QUICK, Placed, Served
from tests.front.scenarios import damage_next_bytes, is_gone, run, until

PROMPT = np.array([104, 105], np.int32)
SLOW = ("--step-seconds", "0.001")
SLOWER = ("--step-seconds", "0.01")
"""A request still runs when the manager has noticed, and killed what it has lost."""


def expected(count: int) -> list[int]:
    return [fake_token(PROMPT.astype("<i4").tobytes(), i) for i in range(count)]


async def finish_of(placed: Placed, max_tokens: int) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for output in placed.front.generate(
        spec_of(PROMPT, SamplingParams(max_tokens=max_tokens))
    ):
        tokens += output.token_ids
        if output.finished is not None:
            return tokens, output.finished
    raise AssertionError("the outputs ended without an end")


def pid_of(placed: Placed, instance: str = "mixed-0") -> int:
    [pid] = [one.pid for one, _ in placed.front.instances() if one.instance_id == instance]
    assert pid is not None
    return pid


async def running(placed: Placed, max_tokens: int) -> "asyncio.Task[tuple[list[int], Finished]]":
    task = asyncio.create_task(finish_of(placed, max_tokens))
    while not any(one.running for one in (await placed.front.stats()).values()):
        await asyncio.sleep(0.005)
    return task


async def test_requests_are_served_and_nothing_is_left(served: Served) -> None:
    async with served(instances={"mixed": 2}) as placed:
        answers = await asyncio.gather(*(finish_of(placed, 25) for _ in range(12)))
        assert {tuple(tokens) for tokens, _ in answers} == {tuple(expected(25))}
        told = [one for one, _ in placed.front.instances()]
        assert [one.host for one in told] == ["127.0.0.1"] * 2
        assert [one.pid_here for one in told] == [None] * 2
        pids = [pid_of(placed, name) for name in ("mixed-0", "mixed-1")]
        started = dict(placed.placement.started)
        incarnations = {one.report.facts.incarnation for one in told if one.report}
        assert incarnations == set(started.values())
    assert all(is_gone(pid) for pid in pids)


async def test_a_killed_process_is_started_again_as_another_incarnation(served: Served) -> None:
    async with served(*SLOW) as placed:
        request = await running(placed, 400)
        os.kill(pid_of(placed), signal.SIGKILL)
        tokens, finished = await request
        assert (tokens, finished.attempt) == (expected(400), 1)
        (_, first), (_, second) = placed.placement.started
        assert first != second


@pytest.mark.long
async def test_an_instance_whose_pipe_ends_is_started_again(served: Served) -> None:
    """The request goes on exactly, at another incarnation."""
    async with served(*SLOWER) as placed:
        request = await running(placed, 400)
        pid = pid_of(placed)
        placed.placement.unleash("mixed-0")
        await until(placed.restarted)
        tokens, finished = await request
        assert (tokens, finished.attempt) == (expected(400), 1)
        await until(lambda: is_gone(pid))
        assert pid_of(placed) != pid


async def test_an_instance_that_the_manager_has_lost_is_dialled_again(served: Served) -> None:
    async with served(*SLOWER) as placed:
        request = await running(placed, 400)
        pid, cut = pid_of(placed), placed.managers_line("mixed-0")
        cut.abort()
        await until(lambda: placed.managers_line("mixed-0") is not cut)
        assert (await request)[1].attempt == 0
        assert pid_of(placed) == pid and len(placed.placement.started) == 1


@pytest.mark.long
async def test_a_damaged_stream_ends_the_incarnation(served: Served) -> None:
    async with served(*SLOWER) as placed:
        request = await running(placed, 400)
        damaged = damage_next_bytes(placed.managers_line("mixed-0"), Random(3))
        tokens, finished = await request
        assert damaged.is_set()
        assert (tokens, finished.attempt) == (expected(400), 1)
        (_, first), (_, second) = placed.placement.started
        assert first != second


async def test_a_process_that_hangs_is_killed_on_its_machine(served: Served) -> None:
    async with served(limits=replace(QUICK, silence_seconds=0.8)) as placed:
        pid = pid_of(placed)
        os.kill(pid, signal.SIGSTOP)
        await until(placed.restarted)
        assert is_gone(pid)
        assert (await finish_of(placed, 5))[0] == expected(5)


async def test_a_machine_that_does_not_answer_holds_nobody_up(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection ends, and what it had goes on at another, before it is there again."""
    async with served(*SLOW, instances={"mixed": 2}) as placed:
        request = await running(placed, 400)
        [busy] = [one.instance_id for one, line in placed.front.instances() if line.in_flight]
        pid = pid_of(placed, busy)
        placed.placement.lost.add(busy)
        os.kill(pid, signal.SIGKILL)
        tokens, finished = await request
        assert (tokens, finished.attempt) == (expected(400), 1)
        assert busy in placed.placement.lost
        placed.placement.lost.clear()
    assert "its machine does not answer" in caplog.text


async def test_a_machine_that_never_answers_again_keeps_nobody_waiting(served: Served) -> None:
    async with served(instances={"mixed": 2}) as placed:
        placed.placement.lost.add("mixed-1")
        os.kill(pid_of(placed, "mixed-1"), signal.SIGKILL)
        states = placed.front.instances
        await until(lambda: [one.state for one, _ in states()] == ["serving", "failing"])
        assert (await finish_of(placed, 5))[0] == expected(5)


@pytest.mark.parametrize(
    ("arguments", "seconds", "message", "code"),
    [
        (("--says", "kvell: --memory=1: is too little", "--exit-at-start", "2"), 20, "exit 2", 2),
        (("--stays-away",), 0.6, "did not listen within", None),
        (("--schema-version", "99"), 20, "another protocol", None),
    ],
)
def test_an_instance_that_does_not_come_is_an_error(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    arguments: tuple[str, ...],
    seconds: float,
    message: str,
    code: int | None,
) -> None:
    """What it said on its machine's terminal is in the front's log."""

    async def scenario() -> None:
        with pytest.raises(InstanceStartError, match=message) as caught:
            async with served(*arguments, placing_seconds=seconds):
                raise AssertionError("it serves")
        assert caught.value.exit_code == code

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert ("is too little" in caplog.text) == (code == 2)


async def test_instances_are_added_and_drained(served: Served) -> None:
    async with served(*SLOW) as placed:
        await placed.front.scale({"mixed": 2})
        states = placed.front.instances
        await until(lambda: [one.state for one, _ in states()] == ["serving"] * 2)
        request = await running(placed, 300)
        pid = pid_of(placed)
        await placed.front.drain("mixed-0")
        assert (await request)[0] == expected(300)
        await until(lambda: [one.instance_id for one, _ in states()] == ["mixed-1"])
        assert placed.placement.left == ["mixed-0"]
        await until(lambda: is_gone(pid))
