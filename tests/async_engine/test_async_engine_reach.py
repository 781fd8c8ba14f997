"""A request that is longer than the memory of its instance, beside short ones: the same bits."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.statistics import Stats
from kvell.errors import ChangeSomething
from kvell.fleet.started.front_limits import FrontLimits
from kvell.vocabulary import MIB
from tests.async_engine.lent_texts import Said, alone, said, text_of

LONG_ANSWER = 24
PAGES_OF_SECTION = 32
PATIENCE_SECONDS = 1500
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Setting:
    """A fleet, and what it is asked.

    :param tokens: of the long prompt.
    :param short_tokens: of each short prompt, of which so many are asked at once: ``at_once``.
    :param short_answer: tokens of each of their answers.
    :param least_share: of the other instances' pools that short requests use at some moment.
    """

    instances: int
    kv_bytes: int
    tokens: int
    short_tokens: int
    at_once: int
    least_share: float
    short_answer: int = 40
    routing: str = "least-load"


SIX = Setting(6, 48 * MIB, 4000, 50, 2, 0.0)
"""The prompt takes 176 MiB: 3.7 pools."""
NINE = Setting(9, 60 * MIB, 8110, 130, 23, 0.25, 30, "most-free-memory")
"""With its answer the prompt takes six pools.  Beside two sections of 22.5 MiB a creditor has room
for two short requests of ten pages, beside one for five: so they must go where there is memory."""


def short_prompts(setting: Setting) -> list[list[int]]:
    return [text_of(setting.short_tokens, 41 * index + 7) for index in range(setting.at_once)]


def share_of_short(stats: dict[str, Stats]) -> float:
    """Part of the pools of all instances that lend, in which there is no section."""
    lending = [one for one in stats.values() if one.sections["lent"]]
    used = sum(one.groups[0].used_pages for one in lending)
    lent = sum(one.sections["lent"] for one in lending) * PAGES_OF_SECTION
    pages = sum(one.groups[0].most_pages for one in lending)
    return (used - lent) / pages if pages else 0.0


async def again_and_again(
    engine: AsyncEngine, prompt: list[int], answer: int, until: "asyncio.Task[Said]"
) -> list[Said]:
    found = [await said(engine, prompt, answer)]
    while not until.done():
        found.append(await said(engine, prompt, answer))
    return found


async def most_short(engine: AsyncEngine, until: "asyncio.Task[Said]") -> float:
    """The largest share of short requests while the long one runs."""
    most = 0.0
    while not until.done():
        most = max(most, share_of_short(await engine.stats()))
        await asyncio.sleep(POLL_SECONDS)
    return most


async def scenario(path: Path, setting: Setting) -> tuple[Said, list[list[Said]], float]:
    engine = AsyncEngine(
        str(path),
        instances=f"mixed={setting.instances}",
        limits=FrontLimits(drain_seconds=60),
        dtype="float32",
        kv_memory_bytes=setting.kv_bytes,
        routing=setting.routing,
    )
    async with engine:
        long = asyncio.create_task(said(engine, text_of(setting.tokens), LONG_ANSWER))
        while not any(one.sections["borrowed"] for one in (await engine.stats()).values()):
            assert not long.done(), "it ended before anything was lent"

        answer = setting.short_answer
        asking = (again_and_again(engine, one, answer, long) for one in short_prompts(setting))
        share, short = await asyncio.gather(most_short(engine, long), asyncio.gather(*asking))
        while any(one.sections["lent"] for one in (await engine.stats()).values()):
            await asyncio.sleep(0)
        for stats in (await engine.stats(with_audit=True)).values():
            assert stats.problems == ()
            assert [group.used_pages for group in stats.groups] == [0] * len(stats.groups)
        with pytest.raises(ChangeSomething, match="that the instances can hold together"):
            await said(engine, text_of(100 * setting.tokens), 1)
    return await long, short, share


def check(path: Path, setting: Setting) -> None:
    prompts = [(text_of(setting.tokens), LONG_ANSWER)]
    prompts += [(prompt, setting.short_answer) for prompt in short_prompts(setting)]
    expected_long, *expected = alone(path, prompts, kv_bytes=512 * MIB)

    async def bounded() -> tuple[Said, list[list[Said]], float]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await scenario(path, setting)

    found, short, share = asyncio.run(bounded())
    assert found == expected_long
    for one, answers in zip(expected, short, strict=True):
        assert answers == [one] * len(answers)
    assert share >= setting.least_share


@pytest.mark.long
def test_a_prompt_of_two_pools_to_the_second_model(smollm2_path: Path) -> None:
    """It has the first model's weights, by a name of its own."""
    tokens, kv_bytes = text_of(2000), 48 * MIB
    [expected] = alone(smollm2_path, [(tokens, LONG_ANSWER)], kv_bytes=512 * MIB)
    engine = AsyncEngine(
        str(smollm2_path),
        beside=[f"second={smollm2_path}"],
        instances="mixed=3",
        dtype="float32",
        kv_memory_bytes=kv_bytes,
    )

    async def borrows(asked: "asyncio.Task[Said]") -> bool:
        while not asked.done():
            if any(one.sections["borrowed"] for one in (await engine.stats()).values()):
                return True
        return False

    async def ask() -> tuple[Said, bool]:
        async with asyncio.timeout(PATIENCE_SECONDS), engine:
            asked = asyncio.create_task(said(engine, tokens, LONG_ANSWER, model="second"))
            return await asyncio.gather(asked, borrows(asked))

    answer, borrowed = asyncio.run(ask())
    assert borrowed and answer == expected


@pytest.mark.long
def test_a_prompt_of_four_pools_in_six_instances(smollm2_path: Path) -> None:
    check(smollm2_path, SIX)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_SECONDS + 100)
def test_a_request_of_six_pools_in_nine_instances(smollm2_path: Path) -> None:
    check(smollm2_path, NINE)
