"""Questions about pages: shared, answered in order, bounded in time and number."""

import asyncio
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from kvell.engine.protocol.messages import Command
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import InstanceDied, TryLater
from kvell.fleet.instance.watch import MOST_QUESTIONS, Watch, pages_of
from kvell.front.front import Front
from kvell.testing.instance import LARGE_PAGES
from tests.engine.works import spec_of
from tests.front.scenarios import until

CommandFactory = Callable[..., list[str]]
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
