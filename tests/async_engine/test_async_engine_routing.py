"""Real instances tell what they cache, and prompts go there."""

import asyncio
from pathlib import Path

import pytest

from kvell import AsyncEngine, SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.vocabulary import MIB
from tests.async_engine.conftest import SECONDS, SharedEngine
from tests.front.scenarios import run

pytestmark = pytest.mark.xdist_group("async_engine")
LENGTH, TURNS = 320, 4
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def computed(stats: dict[str, Stats]) -> int:
    begins = [one for name, one in stats.items() if not name.startswith("decode")]
    return sum(one.prefix_cache_queries - one.prefix_cache_hits for one in begins)


async def when_idle(engine: AsyncEngine) -> dict[str, Stats]:
    """Counters of all instances once none has work: who is busy may not answer in time."""
    while True:
        stats = await engine.stats()
        is_whole = len(stats) == len(engine.instances())
        if is_whole and not any(one.running or one.waiting for one in stats.values()):
            return stats
        await asyncio.sleep(0.01)


async def go_where_they_are_cached(engine: AsyncEngine) -> None:
    """Instances that took turns would compute the same beginning twice."""
    before = computed(await when_idle(engine))
    for family in range(2):
        beginning = [family * 50 + 7 + i % 31 for i in range(LENGTH)]
        for turn in range(TURNS):
            prompt = [*beginning, 300 + turn, 400 + turn]
            async for _ in engine.generate(prompt, GREEDY):
                pass
    stats = await engine.stats(with_audit=True)
    assert all(one.problems == () for one in stats.values())
    assert computed(stats) - before < 2 * (LENGTH + TURNS * 40), "a beginning was computed again"


def test_prompts_go_where_their_beginning_is_cached(shared_engine: SharedEngine) -> None:
    shared_engine.run(go_where_they_are_cached)


@pytest.mark.long
@pytest.mark.parametrize(
    ("instances", "routing"),
    [
        ("mixed=2", "prompt-tree"),
        ("prefill=2,decode=1", "longest-prefix"),
        ("prefill=2,decode=1", "prompt-tree"),
    ],
)
def test_so_they_do_by_other_policies_and_between_other_roles(
    smollm2_path: Path, instances: str, routing: str
) -> None:
    async def scenario() -> None:
        async with AsyncEngine(
            "smollm2",
            instances=instances,
            routing=routing,
            cache_dir=smollm2_path.parent,
            dtype="float32",
            kv_memory_bytes=128 * MIB,
        ) as engine:
            await go_where_they_are_cached(engine)

    run(scenario(), SECONDS)
