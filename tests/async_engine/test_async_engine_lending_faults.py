"""Debtors and creditors that die, hang or sleep while a request reads lent pages change nothing."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvell.async_engine import AsyncEngine
from kvell.fleet.instance.supervisor import RestartPolicy
from kvell.fleet.started.front_limits import FrontLimits
from tests.async_engine.fault_cases import LENDING_REFUSALS
from tests.async_engine.handover_faults import (
    LENDING_KINDS,
    Faults,
    Outcome,
    borrowing,
    check,
    disturbed,
    rested,
)
from tests.async_engine.jobs import Job
from tests.async_engine.lending_jobs import KV_BYTES, long_jobs, wide_model

INSTANCES = "mixed=4"
MAKE = partial(Faults, find=borrowing, most_stopped_seconds=4.0)
"""One that wakes may find that what it read was recalled and taken back: after two seconds."""
STREAMS = 5
FEW = ("pause creditor", "kill creditor", "kill debtor")
LIMITS = FrontLimits(
    drain_seconds=60, silence_seconds=6.0, restart=RestartPolicy(0.05, 0.5, attempts=1000)
)
FEW_SECONDS, MANY_SECONDS = 400, 4000


@pytest.fixture(scope="module")
def directory(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(smollm2_path, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def jobs(directory: Path) -> list[Job]:
    return long_jobs(directory)


async def scenario(directory: Path, jobs: Sequence[Job], kinds: Sequence[str]) -> Outcome:
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": KV_BYTES}
    async with AsyncEngine(
        str(directory), instances=INSTANCES, limits=LIMITS, **settings
    ) as engine:
        outcome = await disturbed(engine, jobs, kinds, STREAMS, len(kinds), make=MAKE)
        await rested(engine)
        lent = [one.sections["lent"] for one in (await engine.stats()).values()]
        assert not any(lent), "a loan was left"
        return outcome


def run(directory: Path, jobs: Sequence[Job], kinds: Sequence[str], seconds: float) -> None:
    async def bounded() -> Outcome:
        async with asyncio.timeout(seconds):
            return await scenario(directory, jobs, kinds)

    check(asyncio.run(bounded()), kinds, LENDING_REFUSALS)


@pytest.mark.long
def test_a_few_faults_of_debtors_and_creditors(directory: Path, jobs: list[Job]) -> None:
    run(directory, jobs, FEW, FEW_SECONDS)


@pytest.mark.long
@pytest.mark.timeout(MANY_SECONDS + 100)
def test_a_hundred_faults_of_debtors_and_creditors(directory: Path, jobs: list[Job]) -> None:
    kinds = list(itertools.islice(itertools.cycle(LENDING_KINDS), 100))
    run(directory, jobs, kinds, MANY_SECONDS)
