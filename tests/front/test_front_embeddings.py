"""Vectors over a front: instances that die, lines that are full, readers that leave."""

import asyncio
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished, Heartbeat
from kvell.engine.protocol.pooling import POOLED
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import InstanceDied, RequestFailed, TryLater
from kvell.fleet.started.front_limits import FrontLimits
from kvell.front.front import Front
from kvell.front.request_log import EndedRequest, LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.text.embeddings import all_embedded, embed
from kvell.server.text.text_stream import RequestRefused
from kvell.testing.instance import CHUNK_TOKENS, CRASH_TOKEN, REFUSE_TOKEN, fake_vector
from kvell.vocabulary import RequestId
from tests.engine.works import spec_of
from tests.front.scenarios import QUICK, finish_of, only, stats_when, until
from tests.reports import facts, load

CommandFactory = Callable[..., list[str]]
FOREVER = SamplingParams(max_tokens=1 << 30)


def prompt(number: int, tokens: int = 5) -> RequestSpec:
    return pooled([number % 200 + 3] * tokens, f"vector-{number}")


def pooled(prompt: list[int], name: str) -> RequestSpec:
    return spec_of(prompt, POOLED, name, pooling="last")


def check(one: RequestSpec, finished: Finished) -> None:
    assert finished.embedding == fake_vector(one.prompt).tobytes()
    assert (finished.reason, finished.output_tokens) == ("stop", 0)


async def test_beside_answers_everybody_gets_their_own(instance_command: CommandFactory) -> None:
    limits = FrontLimits(max_waiting=30)
    async with Front(instance_command("--credits", "4"), limits=limits) as front:
        prompts = [prompt(number) for number in range(12)]
        answers = asyncio.gather(
            *(finish_of(front, SamplingParams(max_tokens=9), one.token_ids) for one in prompts)
        )
        for one, finished in zip(prompts, await all_embedded(front, prompts), strict=True):
            check(one, finished)
        assert [len(tokens) for tokens, _ in await answers] == [9] * 12
        assert (front.waiting, front.in_flight) == (0, 0)


async def test_another_attempt_after_a_kill_gives_the_vector(
    instance_command: CommandFactory,
) -> None:
    command = instance_command("--step-seconds", "0.01")
    async with Front(command, limits=QUICK) as front:
        long = prompt(7, 60 * CHUNK_TOKENS)
        running = asyncio.create_task(embed(front, long))
        await until(lambda: front.in_flight == 1)
        pid = only(front).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        finished = await running
        check(long, finished)
        assert finished.attempt == 1
        assert only(front).restarts == 1


async def test_one_that_ends_every_instance_is_not_tried_for_ever(
    instance_command: CommandFactory,
) -> None:
    async with Front(instance_command(), limits=QUICK) as front:
        crashing = pooled([CRASH_TOKEN], "crash")
        with pytest.raises((RequestFailed, InstanceDied)):
            await embed(front, crashing)


async def test_whoever_leaves_cancels_it(instance_command: CommandFactory) -> None:
    async with Front(instance_command("--step-seconds", "0.01")) as front:
        prompts = [prompt(number, 60 * CHUNK_TOKENS) for number in range(5)]
        running = asyncio.create_task(all_embedded(front, prompts))
        await until(lambda: front.in_flight == 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        stats = await stats_when(front, lambda stats: stats.running == 0)
        assert stats.finished == {"cancelled": 5}
        await until(lambda: front.in_flight == 0)


async def test_the_first_failure_cancels_the_others(instance_command: CommandFactory) -> None:
    async with Front(instance_command("--step-seconds", "0.01")) as front:
        prompts = [prompt(number, 60 * CHUNK_TOKENS) for number in range(3)]
        refused = pooled([REFUSE_TOKEN], "refused")
        with pytest.raises(RequestRefused, match="can never fit"):
            await all_embedded(front, [*prompts, refused])
        assert front.waiting == 0
        await until(lambda: front.in_flight == 0)


async def test_a_long_list_takes_the_room_there_is(instance_command: CommandFactory) -> None:
    """And no more: two credits, and one place in the line."""
    metrics = ServerMetrics("fake")
    command = instance_command("--credits", "2")
    async with Front(command, limits=QUICK, observer=metrics) as front:
        assert front.room == 3
        prompts = [prompt(number) for number in range(40)]
        for one, finished in zip(prompts, await all_embedded(front, prompts), strict=True):
            check(one, finished)
        assert b'kvell:admission_rejections_total{model_name="fake",reason="max_waiting"} 0.0' in (
            metrics.render()
        )


async def test_it_goes_on_with_less_when_others_take_the_room(
    instance_command: CommandFactory,
) -> None:
    command = instance_command("--credits", "2", "--step-seconds", "0.002")
    async with Front(command, limits=QUICK) as front:
        prompts = [prompt(number, 3 * CHUNK_TOKENS) for number in range(30)]
        running = asyncio.create_task(all_embedded(front, prompts))
        others = [
            asyncio.create_task(until_let_in(front, FOREVER, f"answer-{n}")) for n in range(2)
        ]
        await asyncio.gather(*others)
        front.stop("answer-0")
        for one, finished in zip(prompts, await running, strict=True):
            check(one, finished)
        front.stop("answer-1")
        await until(lambda: front.in_flight == 0)


async def until_let_in(front: Front, sampling: SamplingParams, name: str) -> None:
    """Begin an answer as soon as there is room, and let it go on."""
    while True:
        outputs = front.generate(spec_of(np.asarray([9], np.int32), sampling, request_id=name))
        try:
            await anext(outputs)
        except TryLater:
            await asyncio.sleep(0)
        else:
            asyncio.get_running_loop().create_task(read_to_its_end(outputs))
            return


async def read_to_its_end(outputs: object) -> None:
    async for _ in outputs:  # type: ignore[attr-defined]
        pass


async def test_without_room_it_fails_at_once(instance_command: CommandFactory) -> None:
    async with Front(instance_command("--credits", "1"), limits=QUICK) as front:
        readers = [
            asyncio.create_task(finish_of(front, FOREVER, prompt(n).token_ids)) for n in range(2)
        ]
        await until(lambda: front.room == 0)
        with pytest.raises(TryLater):
            await all_embedded(front, [prompt(number) for number in range(5)])
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def test_without_an_instance_it_fails_at_once(instance_command: CommandFactory) -> None:
    front = Front(instance_command())
    with pytest.raises(InstanceDied):
        await all_embedded(front, [prompt(1), prompt(2)])


async def test_one_that_is_stopped_has_no_vector(instance_command: CommandFactory) -> None:
    async with Front(instance_command("--step-seconds", "0.01")) as front:
        long = prompt(1, 60 * CHUNK_TOKENS)
        running = asyncio.create_task(embed(front, long))
        await until(lambda: front.in_flight == 1)
        front.stop(long.request_id)
        with pytest.raises(RequestFailed, match="stopped"):
            await running


# -------------------------------------------------------------- bookkeeping, without I/O


def entry(name: str) -> LogEntry:
    return LogEntry(RequestSpec(RequestId(name), b"\7\0\0\0" * 6, POOLED, pooling="last"), 1.0)


def test_its_submission_asks_for_the_vector_and_its_end_tells_no_bound_on_output() -> None:
    one = entry("a")
    submission = one.submission()
    assert (submission.spec.pooling, submission.output) == ("last", b"")
    ended = one.to_record(Finished(one.request_id, 0, "stop", embedding=b"x"), 4.0)
    assert (ended.max_tokens, ended.output_tokens, ended.seconds) == (None, 0, 3.0)


def test_an_instance_that_joins_others_gets_more_with_every_vector() -> None:
    """Else it would have four requests at once as long as nobody asks it for tokens."""
    queue = RequestQueue(max_waiting=100)
    queue.line("new").open(facts(64), joins_others=True)
    for number in range(20):
        queue.add(entry(f"q{number}"))
    sizes = []
    sent = queue.due(2.0)
    while sent:
        sizes.append(queue.in_flight)
        first = sent[0][1]
        queue.on_finished(Finished(first.request_id, 0, "stop", embedding=b"x"), 3.0)
        sent = queue.due(3.0)
    assert sizes[:4] == [4, 5, 6, 7]
    line = queue.line("new")
    line.on_heartbeat(Heartbeat(load(10, 10)))
    left = len(line.in_flight)
    assert line.outstanding_prompt_tokens == 6 * left


def test_metrics_count_a_prompt_that_had_no_first_token() -> None:
    metrics = ServerMetrics("fake")
    done = Finished(RequestId("a"), 0, "stop", 6, 0, 2, embedding=b"x")
    metrics.on_ended(EndedRequest(done, 1.0, 0.5, 0, None))
    assert metrics.token_totals() == (6, 0)
    metrics.on_ended(EndedRequest(Finished(RequestId("b"), 0, "cancelled", 6), 1.0, 0.5, 0, None))
    assert metrics.token_totals() == (6, 0)
