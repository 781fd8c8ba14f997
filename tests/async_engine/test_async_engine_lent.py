"""A request whose instance has no memory left borrows from its neighbour, bit for bit."""

import asyncio
from pathlib import Path

import pytest

from kvell.async_engine import AsyncEngine
from kvell.fleet.started.front_limits import FrontLimits
from kvell.mempool.rendezvous import PageTransport
from tests.async_engine.lending_jobs import KV_BYTES as WIDE_KV_BYTES
from tests.async_engine.lending_jobs import wide_model
from tests.async_engine.lent_texts import KV_BYTES, Said, alone, said, sections, texts

PATIENCE_SECONDS = 300
LONG_TOKENS, LONG_ANSWER = 1950, 200
"""Together they fill the pool but for one token in 60."""
WIDE_LONG = [7 + i * i % 40_000 for i in range(2200)], 120
"""Longer than the pool: it borrows from the first."""


def long_prompt() -> list[int]:
    joined = [token for text in texts() for token in text]
    return (joined * (1 + LONG_TOKENS // len(joined)))[:LONG_TOKENS]


async def scenario(
    path: Path, prompts: list[tuple[list[int], int]], transport: PageTransport, kv_bytes: int
) -> list[Said]:
    engine = AsyncEngine(
        str(path),
        instances="mixed=2",
        limits=FrontLimits(drain_seconds=60),
        dtype="float32",
        kv_memory_bytes=kv_bytes,
        page_transport=transport,
    )
    async with engine:
        long, *short = prompts
        asking = asyncio.create_task(said(engine, *long))
        while not await sections(engine, "borrowed"):
            assert not asking.done(), "it ended before anything was lent"
        answers = await asyncio.gather(*(said(engine, *one) for one in short))
        assert not asking.done() and await sections(engine, "lent"), "they ran beside the loan"
        found = [await asking, *answers]
        while await sections(engine, "lent"):
            await asyncio.sleep(0)
        assert await sections(engine, "lost") == 0
        for stats in (await engine.stats(with_audit=True)).values():
            assert stats.problems == ()
            assert [group.used_pages for group in stats.groups] == [0] * len(stats.groups)
    return found


def check(path: Path, long: tuple[list[int], int], transport: PageTransport, kv: int) -> None:
    """A long request and two short ones are answered as by one engine with more memory.

    :param kv: bytes of an instance's pool.
    """
    prompts = [long, *((text, 8) for text in texts()[:2])]
    expected = alone(path, prompts, 2 * kv)

    async def bounded() -> list[Said]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await scenario(path, prompts, transport, kv)

    assert asyncio.run(bounded()) == expected


def test_the_same_bits_as_one_engine_with_more_memory(smollm2_path: Path, tmp_path: Path) -> None:
    """By a model of little work; pages of the creditor are read in place."""
    check(wide_model(smollm2_path, tmp_path), WIDE_LONG, "memory", WIDE_KV_BYTES)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_the_same_bits_by_smollm2(smollm2_path: Path, transport: PageTransport) -> None:
    """Over TCP the creditor is asked for attention over its pages."""
    check(smollm2_path, (long_prompt(), LONG_ANSWER), transport, KV_BYTES)
