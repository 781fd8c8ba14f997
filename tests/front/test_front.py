"""The front over real instance processes: death, restart, cancellation, drain."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.protocol.messages import SCHEMA_VERSION
from kvell.engine.protocol.sampling_params import SamplingParams, SeedSource
from kvell.errors import InstanceDied, TryLater
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.fleet.started.front_limits import FrontLimits
from kvell.front.front import Front
from kvell.testing.instance import fake_token
from tests.engine.works import spec_of
from tests.front.scenarios import QUICK, finish_of, only, stats_of, stats_when, until

FOREVER = SamplingParams(max_tokens=1 << 30)
CommandFactory = Callable[..., list[str]]
PROMPT = np.array([104, 105], np.int32)


def expected(prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", count: int) -> list[int]:
    return [fake_token(prompt.astype("<i4").tobytes(), i) for i in range(count)]


async def test_many_requests_at_once_get_their_own_tokens(instance_command: CommandFactory) -> None:
    limits = FrontLimits(max_waiting=20)
    async with Front(instance_command("--credits", "3"), limits=limits) as front:
        prompts = [np.array([n, n + 1], np.int32) for n in range(10, 30)]
        sampling = SamplingParams(max_tokens=25)
        answers = await asyncio.gather(*(finish_of(front, sampling, p) for p in prompts))
        for prompt, (tokens, finished) in zip(prompts, answers, strict=True):
            assert tokens == expected(prompt, 25)
            assert (finished.reason, finished.output_tokens) == ("length", 25)
        assert (front.waiting, front.in_flight) == (0, 0)
        assert front.facts.model == "fake"


async def test_leaving_a_request_cancels_it_in_the_instance(
    instance_command: CommandFactory,
) -> None:
    async with Front(instance_command("--step-seconds", "0.001")) as front:
        async with aclosing(front.generate(spec_of(PROMPT, FOREVER))) as outputs:
            assert (await anext(outputs)).token_ids
        stats = await stats_when(front, lambda stats: stats.running == 0)
        assert stats.finished == {"cancelled": 1}
        await until(lambda: front.in_flight == 0)


async def test_stopping_on_purpose_ends_with_stop(instance_command: CommandFactory) -> None:
    async with Front(instance_command("--step-seconds", "0.001")) as front:
        async for output in front.generate(spec_of(PROMPT, FOREVER, request_id="mine")):
            front.stop("mine")
            if output.finished is not None:
                assert output.finished.reason == "stop"


async def test_a_stream_goes_on_after_a_kill_where_it_stopped(
    instance_command: CommandFactory,
) -> None:
    command = instance_command("--step-seconds", "0.001", "--credits", "1")
    async with Front(command, limits=QUICK) as front:
        first_pid = only(front).pid
        assert first_pid is not None
        first_incarnation = front.facts.incarnation
        long = SamplingParams(max_tokens=400)
        running = asyncio.create_task(finish_of(front, long, PROMPT))
        await stats_when(front, lambda stats: stats.running == 1)
        short = SamplingParams(max_tokens=3)
        waiting = asyncio.create_task(finish_of(front, short, PROMPT))
        await until(lambda: front.waiting == 1)
        asked = asyncio.create_task(stats_of(front))
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: front.state == "restarting")
        assert not running.done()
        assert only(front).pid is None
        with pytest.raises(InstanceDied):
            await finish_of(front, short, PROMPT)
        with pytest.raises(InstanceDied):
            await front.stats()
        await asyncio.wait([asked])
        tokens, finished = await running
        assert (tokens, finished.reason) == (expected(PROMPT, 400), "length")
        assert finished.attempt == 1
        tokens, finished = await waiting
        assert (tokens, finished.reason) == (expected(PROMPT, 3), "length")
        report = only(front).report
        assert report is not None
        assert report.facts.incarnation != first_incarnation
        assert only(front).restarts == 1
        second_pid = only(front).pid
        assert second_pid != first_pid
        assert (await stats_of(front)).incarnation == report.facts.incarnation


async def test_a_crash_in_the_engine_is_a_death(instance_command: CommandFactory) -> None:
    async with Front(instance_command(), limits=QUICK) as front:
        _, finished = await finish_of(front, FOREVER, np.array([1], np.int32))
        assert finished.reason == "error"
        assert "two instances ended" in finished.message
        await until(lambda: only(front).restarts == 2)
        await until(lambda: front.state == "serving")
        tokens, _ = await finish_of(front, SamplingParams(max_tokens=2), PROMPT)
        assert tokens == expected(PROMPT, 2)


async def test_whoever_waits_is_told_that_restarts_do_not_help_and_they_go_on(
    instance_command: CommandFactory, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    command = instance_command("--starts-once", str(started), "--credits", "1")
    async with Front(command, limits=QUICK) as front:
        pid = only(front).pid
        assert pid is not None
        running = asyncio.create_task(finish_of(front, FOREVER, PROMPT))
        await until(lambda: front.in_flight == 1)
        waiting = asyncio.create_task(finish_of(front, FOREVER, PROMPT))
        await until(lambda: front.waiting == 1)
        os.kill(pid, signal.SIGKILL)
        assert (await running)[1].reason == "error"
        assert (await waiting)[1].message == "the instance cannot be restarted"
        assert front.state == only(front).state == "failing"
        assert only(front).restarts >= 3
        with pytest.raises(InstanceDied, match="failing"):
            await finish_of(front, FOREVER, PROMPT)
        started.unlink()  # what kept it from starting is over
        await until(lambda: front.state == "serving")
        tokens, finished = await finish_of(front, SamplingParams(max_tokens=3), PROMPT)
        assert (len(tokens), finished.reason) == (3, "length")


async def test_beyond_credits_and_line_comes_try_later(instance_command: CommandFactory) -> None:
    command = instance_command("--step-seconds", "0.001", "--credits", "1")
    async with Front(command, limits=QUICK) as front:
        tasks = [asyncio.create_task(finish_of(front, FOREVER, PROMPT)) for _ in range(2)]
        await until(lambda: front.in_flight == 1 and front.waiting == 1)
        with pytest.raises(TryLater) as caught:
            await finish_of(front, FOREVER, PROMPT)
        assert not isinstance(caught.value, InstanceDied)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: front.in_flight == 0)
        assert (await finish_of(front, SamplingParams(max_tokens=1), PROMPT))[1].reason == "length"


async def test_closing_lets_what_runs_end_and_refuses_what_waits(
    instance_command: CommandFactory,
) -> None:
    command = instance_command("--step-seconds", "0.002", "--credits", "1")
    async with Front(command, limits=QUICK) as front:
        sampling = SamplingParams(max_tokens=100)
        running = asyncio.create_task(finish_of(front, sampling, PROMPT))
        await until(lambda: front.in_flight == 1)
        waiting = asyncio.create_task(finish_of(front, sampling, PROMPT))
        await until(lambda: front.waiting == 1)
        await front.close()
        tokens, finished = await running
        assert (tokens, finished.reason) == (expected(PROMPT, 100), "length")
        assert (await waiting)[1].message == "the server is shutting down"
        with pytest.raises(InstanceDied, match="closing"):
            await finish_of(front, sampling, PROMPT)


async def test_closing_ends_what_outlasts_the_deadline(instance_command: CommandFactory) -> None:
    limits = FrontLimits(drain_seconds=0.05)
    command = instance_command("--step-seconds", "0.001")
    async with Front(command, limits=limits) as front:
        running = asyncio.create_task(finish_of(front, FOREVER, PROMPT))
        await until(lambda: front.in_flight == 1)
        pid = only(front).pid
        assert pid is not None
        await front.close()
        assert (await running)[1].reason == "error"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_an_instance_told_to_end_drains_and_is_replaced(
    instance_command: CommandFactory,
) -> None:
    command = instance_command("--step-seconds", "0.001")
    async with Front(command, limits=QUICK) as front:
        pid = only(front).pid
        assert pid is not None
        running = asyncio.create_task(finish_of(front, SamplingParams(max_tokens=50), PROMPT))
        await stats_when(front, lambda stats: stats.running == 1)
        os.kill(pid, signal.SIGTERM)
        assert (await running)[1].reason == "length"
        await until(lambda: only(front).restarts == 1 and front.state == "serving")
        assert (await finish_of(front, SamplingParams(max_tokens=1), PROMPT))[1].reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        (("--exit-at-start", "2"), "exit 2", 2),
        (("--schema-version", "99"), f"needs version {SCHEMA_VERSION}", None),
    ],
)
async def test_an_instance_that_does_not_become_ready_is_an_error(
    instance_command: CommandFactory,
    arguments: tuple[str, ...],
    message: str,
    exit_code: int | None,
) -> None:
    with pytest.raises(InstanceStartError, match=message) as caught:
        await Front(instance_command(*arguments)).start()
    assert caught.value.exit_code == exit_code


async def test_a_late_instance_and_a_missing_program_are_errors() -> None:
    limits = FrontLimits(startup_seconds=0.05)
    with pytest.raises(InstanceStartError, match=r"within 0.05 s"):
        await Front(["sleep", "60"], limits=limits).start()
    with pytest.raises(InstanceStartError, match="cannot start"):
        await Front(["/nowhere/kvell"]).start()


async def test_a_seed_is_drawn_where_none_was_given(instance_command: CommandFactory) -> None:
    async with Front(instance_command()) as front:

        async def seed_of(sampling: SamplingParams) -> int | None:
            async with aclosing(front.generate(spec_of(PROMPT, sampling))) as outputs:
                await anext(outputs)
                running = front.entries().in_flight
                return running[-1].spec.sampling.seed

        endless = SamplingParams(max_tokens=4000)
        drawn = [await seed_of(endless) for _ in range(2)]
        assert None not in drawn
        assert drawn[0] != drawn[1]
        assert await seed_of(replace(endless, seed=7)) == 7


async def test_seeds_of_a_front_with_a_seed_depend_on_the_order_of_requests(
    instance_command: CommandFactory,
) -> None:
    async def seeds_of(front: Front) -> list[int | None]:
        endless, seeds = SamplingParams(max_tokens=4000), list[int | None]()
        for sampling in (
            endless,
            replace(endless, seed=7),
            replace(endless, temperature=0),
            endless,
        ):
            async with aclosing(front.generate(spec_of(PROMPT, sampling))) as outputs:
                await anext(outputs)
                seeds.append(front.entries().in_flight[-1].spec.sampling.seed)
        return seeds

    async with (
        Front(instance_command(), seed=5) as one,
        Front(instance_command(), seed=5) as two,
    ):
        seeds, others = await seeds_of(one), await seeds_of(two)
    source = SeedSource(5)
    first, second = (source.with_seed(SamplingParams()).seed for _ in range(2))
    assert seeds == others == [first, 7, None, second]
    assert first != second


async def test_concurrent_stats_share_an_answer(instance_command: CommandFactory) -> None:
    async with Front(instance_command()) as front:
        answers = await asyncio.gather(*(stats_of(front) for _ in range(5)))
        assert all(answer is answers[0] for answer in answers)
        assert (await stats_of(front)) is not answers[0]
