"""A second request over a text of which others hold sections: the same bits, not lent twice."""

import asyncio
from pathlib import Path

import pytest

from kvell.async_engine import AsyncEngine
from kvell.fleet.started.front_limits import FrontLimits
from kvell.mempool.rendezvous import PageTransport
from kvell.vocabulary import MIB
from tests.async_engine.lent_texts import Said, alone, said, sections, text_of

KV_BYTES, INSTANCES = 48 * MIB, 6
TOKENS, FIRST_ANSWER, SECOND_ANSWER = 4000, 60, 12
PATIENCE_SECONDS, POLL_SECONDS = 400, 0.1
AWAY = 5
"""Sections that are elsewhere at least while the first one is answered."""


async def scenario(path: Path, transport: PageTransport) -> tuple[Said, Said, int]:
    engine = AsyncEngine(
        str(path),
        instances=f"mixed={INSTANCES}",
        limits=FrontLimits(drain_seconds=60),
        dtype="float32",
        kv_memory_bytes=KV_BYTES,
        page_transport=transport,
    )
    prompt = text_of(TOKENS)
    async with engine:
        first = asyncio.create_task(said(engine, prompt, FIRST_ANSWER))
        while await sections(engine, "borrowed") < AWAY:
            assert not first.done(), "it ended before so much was lent"
            await asyncio.sleep(POLL_SECONDS)
        lent = await sections(engine, "lent")
        second = asyncio.create_task(said(engine, prompt, SECOND_ANSWER))
        while not await sections(engine, "shared"):
            assert not second.done(), "it computed everything"
            await asyncio.sleep(POLL_SECONDS)
        assert not first.done() and await sections(engine, "lent") >= lent + AWAY
        answers = await first, await second
        shared = await sections(engine, "shared")
        while await sections(engine, "lent"):
            await asyncio.sleep(POLL_SECONDS)
        for stats in (await engine.stats(with_audit=True)).values():
            assert stats.problems == ()
            assert [group.used_pages for group in stats.groups] == [0] * len(stats.groups)
    return *answers, shared


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_SECONDS + 200)
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_second_request_reads_what_the_first_one_lent(
    smollm2_path: Path, transport: PageTransport
) -> None:
    """Its pages are in no pool twice; over TCP their creditors are asked by both."""
    prompt = text_of(TOKENS)
    expected, _ = alone(
        smollm2_path, [(prompt, FIRST_ANSWER), (text_of(60), 4)], kv_bytes=512 * MIB
    )

    async def bounded() -> tuple[Said, Said, int]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await scenario(smollm2_path, transport)

    first, second, shared = asyncio.run(bounded())
    assert first == expected
    assert second == (expected[0][:SECOND_ANSWER], expected[1][:SECOND_ANSWER])
    assert shared >= AWAY
