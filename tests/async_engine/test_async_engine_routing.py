"""Real instances tell what they cache, and prompts go there."""

from pathlib import Path

import pytest

from kvell import AsyncEngine, SamplingParams
from kvell.vocabulary import MIB
from tests.front.scenarios import run

SECONDS = 240.0
LENGTH, TURNS = 320, 4
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("routing", ["longest-prefix", "prompt-tree"])
@pytest.mark.parametrize("instances", ["mixed=2", "prefill=2,decode=1"])
def test_prompts_go_where_their_beginning_is_cached(
    smollm2_path: Path, instances: str, routing: str
) -> None:
    """Instances that took turns would compute the same beginning twice."""

    async def scenario() -> None:
        async with AsyncEngine(
            "smollm2",
            instances=instances,
            routing=routing,
            cache_dir=smollm2_path.parent,
            dtype="float32",
            kv_memory_bytes=128 * MIB,
        ) as engine:
            for family in range(2):
                beginning = [family * 50 + 7 + i % 31 for i in range(LENGTH)]
                for turn in range(TURNS):
                    prompt = [*beginning, 300 + turn, 400 + turn]
                    async for _ in engine.generate(prompt, GREEDY):
                        pass
            stats = await engine.stats(with_audit=True)
            assert all(one.problems == () for one in stats.values())
            begins = [one for name, one in stats.items() if not name.startswith("decode")]
            computed = sum(one.prefix_cache_queries - one.prefix_cache_hits for one in begins)
            assert computed < 2 * (LENGTH + TURNS * 40), "a beginning was computed again"

    run(scenario(), SECONDS)
