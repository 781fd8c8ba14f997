"""Instances with every mechanism that die, hang or sleep at random moments change no answer."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvell.async_engine import AsyncEngine
from kvell.engine.lending.placement import NOBODY_LENDS
from kvell.fleet.instance.supervisor import RestartPolicy
from kvell.fleet.started.front_limits import FrontLimits
from tests.async_engine.fault_cases import ACTS, SHAPES
from tests.async_engine.faults import REFUSALS
from tests.async_engine.handover_faults import (
    LENDING_KINDS,
    Faults,
    Outcome,
    anywhere,
    check,
    disturbed,
    rested,
)
from tests.async_engine.jobs import Job
from tests.async_engine.lending_jobs import everything, mixed_jobs

pytestmark = pytest.mark.long
MAKE = partial(Faults, find=anywhere, most_stopped_seconds=4.0)
STREAMS = 8
KINDS = list(itertools.islice(itertools.cycle(LENDING_KINDS), 40))
SEEDS = 3
REASONS = (*REFUSALS, NOBODY_LENDS, "the instances can hold together")
LIMITS = FrontLimits(
    drain_seconds=60, silence_seconds=6.0, restart=RestartPolicy(0.05, 0.5, attempts=1000)
)
MOST_SECONDS = 1500


@pytest.fixture(scope="module")
def settings(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(smollm2_path, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def jobs(settings: dict[str, Any]) -> list[Job]:
    return mixed_jobs(Path(settings["model"]))


async def scenario(
    settings: dict[str, Any], jobs: Sequence[Job], instances: str, seed: int
) -> Outcome:
    async with (
        asyncio.timeout(MOST_SECONDS),
        AsyncEngine(**settings, instances=instances, limits=LIMITS) as engine,
    ):
        outcome = await disturbed(engine, jobs, KINDS, STREAMS, seed, make=MAKE)
        await rested(engine)
        return outcome


@pytest.mark.timeout(MOST_SECONDS + 100)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("instances", SHAPES)
def test_forty_faults_of_instances_with_every_mechanism(
    settings: dict[str, Any], jobs: list[Job], instances: str, seed: int
) -> None:
    outcome = asyncio.run(scenario(settings, jobs, instances, seed))
    check(outcome, KINDS, REASONS)
    sought = [act for act in ACTS if act != "moved" or instances.startswith("prefill")]
    assert [act for act in sought if not outcome.acts[act]] == []
