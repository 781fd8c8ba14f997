"""Instances that die, hang or sleep while requests move between them lose and change nothing."""

import asyncio
import itertools
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvell import LLM
from kvell.async_engine import AsyncEngine
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import RequestFailed
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.front.request_log import LogEntry
from kvell.models.loading.random_weights import write_random_model
from kvell.vocabulary import MIB
from tests.async_engine.faults import REFUSALS, RETRIED, serving
from tests.async_engine.handover_faults import (
    KINDS,
    LOOK_SECONDS,
    Faults,
    Outcome,
    check,
    disturbed,
    rested,
)
from tests.async_engine.jobs import Job
from tests.front.scenarios import until
from tests.front.seen import front_of
from tests.models.harness import tiny_config

STREAMS = 6
FEW = ("pause decode", "kill decode", "orphaned decode", "kill prefill", "hang decode")
LIMITS = FrontLimits(
    drain_seconds=60, silence_seconds=3.0, restart=RestartPolicy(0.05, 0.5, attempts=1000)
)
FEW_SECONDS, MANY_SECONDS = 300, 3000
WORDS = 49_152
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 512 * MIB}


@pytest.fixture(scope="module")
def directory(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of little work and large pages, 64 KiB a token: it moves more than it computes."""
    config = tiny_config(
        "LlamaForCausalLM",
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        vocab_size=WORDS,
    )
    path = write_random_model(tmp_path_factory.mktemp("wide"), config, seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_path / name, path)
    return path


@pytest.fixture(scope="module")
def jobs(directory: Path) -> list[Job]:
    """Prompts that share prefixes, greedy and drawn in turn, and what one engine answers."""
    chance = random.Random(5)
    families = [_words(chance, 320) for _ in range(3)]
    prompts = [families[i % 3] + _words(chance, chance.randrange(8, 320)) for i in range(24)]
    asked = [sampling(number) for number in range(len(prompts))]
    llm = LLM(str(directory), **SETTINGS)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
    return [
        Job(prompt, params, output.token_ids)
        for prompt, params, output in zip(prompts, asked, outputs, strict=True)
    ]


def _words(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, WORDS) for _ in range(count)]


def sampling(number: int) -> SamplingParams:
    most = 8 + 8 * (number % 5)
    if number % 2:
        return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    return SamplingParams(temperature=1.0, seed=number, max_tokens=most, ignore_eos=True)


async def scenario(
    directory: Path, jobs: Sequence[Job], instances: str, kinds: Sequence[str]
) -> Outcome:
    async with AsyncEngine(
        str(directory), instances=instances, limits=LIMITS, **SETTINGS
    ) as engine:
        outcome = await disturbed(engine, jobs, kinds, STREAMS, seed=len(kinds))
        await rested(engine)
        return outcome


def run(
    directory: Path, jobs: Sequence[Job], instances: str, kinds: Sequence[str], seconds: float
) -> None:
    async def bounded() -> Outcome:
        async with asyncio.timeout(seconds):
            return await scenario(directory, jobs, instances, kinds)

    check(asyncio.run(bounded()), kinds, REFUSALS)


@pytest.mark.long
def test_a_few_faults_during_transfers(directory: Path, jobs: list[Job]) -> None:
    run(directory, jobs, "prefill=1,decode=1", FEW, FEW_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("instances", "moments"), [("prefill=1,decode=1", 50), ("prefill=2,decode=2", 50)]
)
def test_a_hundred_faults_during_transfers(
    directory: Path, jobs: list[Job], instances: str, moments: int
) -> None:
    kinds = list(itertools.islice(itertools.cycle(KINDS), moments))
    run(directory, jobs, instances, kinds, MANY_SECONDS)


@pytest.mark.long
def test_a_request_that_dies_at_each_attempt_is_refused_with_its_reason(
    directory: Path, jobs: list[Job]
) -> None:
    """Both sides of its transfer are killed, and then every instance that has it."""

    async def refused() -> None:
        async with (
            asyncio.timeout(FEW_SECONDS),
            AsyncEngine(
                str(directory), instances="prefill=1,decode=1", limits=LIMITS, **SETTINGS
            ) as engine,
        ):
            job, outcome = jobs[0], Outcome()
            endless = replace(job.sampling, max_tokens=1600)
            asking = asyncio.create_task(_answer(engine, replace(job, sampling=endless)))
            faults = Faults(engine, random.Random(1), outcome, most_delay_seconds=0)
            async with asyncio.TaskGroup() as kills:
                kills.create_task(faults.strike("kill both"))
                killed = set[int | None]()
                while not asking.done():
                    for entry in _died_once(engine):
                        pid = faults.status(entry.line).pid
                        if pid not in killed:  # the same one is not killed twice
                            killed.add(pid)
                            kills.create_task(faults.kill((entry.line,), (), [entry]))
                    await asyncio.sleep(LOOK_SECONDS)
            with pytest.raises(RequestFailed, match=RETRIED):
                await asking
            await until(lambda: len(serving(engine)) == 2)
            assert await _answer(engine, job) == job.tokens
            await rested(engine)

    asyncio.run(refused())


def _died_once(engine: AsyncEngine) -> list[LogEntry]:
    return [entry for entry in front_of(engine).entries().in_flight if entry.attempts.deaths]


async def _answer(engine: AsyncEngine, job: Job) -> list[int]:
    tokens = list[int]()
    async for output in engine.generate(job.prompt, job.sampling):
        tokens = output.token_ids
    return tokens
