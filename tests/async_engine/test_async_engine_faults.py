"""No request is lost, repeated or changed when real instances die, hang or send rubbish."""

import asyncio
from pathlib import Path

import pytest

from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.vocabulary import MIB
from tests.async_engine.conftest import SharedEngine, greedy_rows
from tests.async_engine.faults import KINDS, disturbed, whole
from tests.async_engine.jobs import Job

pytestmark = pytest.mark.xdist_group("async_engine")
STREAMS = 9
LIMITS = FrontLimits(
    drain_seconds=60, silence_seconds=4.0, restart=RestartPolicy(0.05, 0.5, attempts=1000)
)
FEW_SECONDS, MANY_SECONDS = 300, 2400


def prompts() -> list[list[int]]:
    return [row["prompt_token_ids"] for row in greedy_rows()[:24]]


def sampling(number: int, tokens: int) -> SamplingParams:
    """Greedy and drawn answers in turn, long enough to be interrupted."""
    if number % 2:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return SamplingParams(
        temperature=1.0, top_p=0.9, seed=number, max_tokens=tokens, ignore_eos=True
    )


async def go_on(
    engine: AsyncEngine, moments: int, streams: int, most_prompts: int, tokens: int
) -> None:
    """Let instances fail at so many random moments while so many streams ask these prompts."""
    asked = [(prompt, sampling(n, tokens)) for n, prompt in enumerate(prompts()[:most_prompts])]
    answers = await asyncio.gather(*(whole(engine, *one) for one in asked))
    jobs = [Job(*one, answer) for one, answer in zip(asked, answers, strict=True)]
    outcome = await disturbed(engine, jobs, moments, streams, seed=moments)
    assert outcome.faults.total() == moments
    assert set(outcome.faults) == set(KINDS[:moments])
    assert outcome.answered >= moments, "there was load"
    assert outcome.wrong == []
    assert outcome.unexpected() == []
    for stats in (await engine.stats(with_audit=True)).values():
        assert (stats.running, stats.waiting) == (0, 0)
        assert [group.used_pages for group in stats.groups] == [0] * len(stats.groups)
        assert stats.problems == ()
    print(outcome.faults, outcome.answered, "answered,", len(outcome.refused), "refused")  # noqa: T201


def test_an_instance_is_killed_at_a_random_moment(shared_engine: SharedEngine) -> None:
    shared_engine.run(lambda engine: go_on(engine, 1, streams=4, most_prompts=4, tokens=24))


@pytest.mark.long
@pytest.mark.parametrize(
    ("moments", "instances", "seconds"),
    [(3, "mixed=2", FEW_SECONDS), (100, "mixed=3", MANY_SECONDS)],
)
def test_faults_at_random_moments(
    smollm2_path: Path, moments: int, instances: str, seconds: float
) -> None:
    async def scenario() -> None:
        async with (
            asyncio.timeout(seconds),
            AsyncEngine(
                "smollm2",
                instances=instances,
                limits=LIMITS,
                cache_dir=smollm2_path.parent,
                dtype="float32",
                kv_memory_bytes=128 * MIB,
            ) as engine,
        ):
            await go_on(engine, moments, STREAMS, 24, tokens=64)

    asyncio.run(scenario())
