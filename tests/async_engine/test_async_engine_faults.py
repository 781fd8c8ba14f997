"""No request is lost, repeated or changed when real instances die, hang or send rubbish."""

import asyncio
import json
from pathlib import Path

import pytest

from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.instance.restart import RestartPolicy
from kvell.fleet.started.front_limits import FrontLimits
from kvell.vocabulary import MIB
from tests.async_engine.faults import KINDS, RETRIED, Job, disturbed, whole

DATA = Path(__file__).parents[1] / "data"
STREAMS = 9
LIMITS = FrontLimits(
    drain_seconds=60, silence_seconds=4.0, restart=RestartPolicy(0.05, 0.5, attempts=1000)
)
FEW_SECONDS, MANY_SECONDS = 300, 2400


def prompts() -> list[list[int]]:
    rows = (DATA / "smollm2_greedy.jsonl").read_text().splitlines()
    return [json.loads(row)["prompt_token_ids"] for row in rows[:24]]


def sampling(number: int) -> SamplingParams:
    """Greedy and drawn answers in turn, long enough to be interrupted."""
    if number % 2:
        return SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    return SamplingParams(temperature=1.0, top_p=0.9, seed=number, max_tokens=64, ignore_eos=True)


async def scenario(cache_dir: Path, moments: int, instances: str) -> None:
    engine = AsyncEngine(
        "smollm2",
        instances=instances,
        limits=LIMITS,
        cache_dir=cache_dir,
        dtype="float32",
        kv_memory_bytes=128 * MIB,
    )
    async with engine:
        asked = [(prompt, sampling(number)) for number, prompt in enumerate(prompts())]
        answers = await asyncio.gather(*(whole(engine, *one) for one in asked))
        jobs = [Job(*one, answer) for one, answer in zip(asked, answers, strict=True)]
        outcome = await disturbed(engine, jobs, moments, STREAMS, seed=moments)
        assert outcome.faults.total() == moments
        assert set(outcome.faults) == set(KINDS)
        assert outcome.answered >= moments, "there was load"
        assert outcome.wrong == []
        assert all(RETRIED in why for why in outcome.refused), outcome.refused
        for stats in (await engine.stats(with_audit=True)).values():
            assert (stats.running, stats.waiting) == (0, 0)
            assert [group.used_pages for group in stats.groups] == [0] * len(stats.groups)
            assert stats.problems == ()
        print(outcome.faults, outcome.answered, "answered,", len(outcome.refused), "refused")  # noqa: T201


async def bounded(cache_dir: Path, moments: int, instances: str, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await scenario(cache_dir, moments, instances)


def test_faults_at_a_few_random_moments(smollm2_path: Path) -> None:
    asyncio.run(bounded(smollm2_path.parent, 3, "mixed=2", FEW_SECONDS))


@pytest.mark.long
def test_faults_at_a_hundred_random_moments(smollm2_path: Path) -> None:
    asyncio.run(bounded(smollm2_path.parent, 100, "mixed=3", MANY_SECONDS))
