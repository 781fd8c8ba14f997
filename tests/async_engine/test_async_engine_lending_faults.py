"""Instances that lend, or have every mechanism, and die, hang or sleep: no answer changes."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvell.async_engine import AsyncEngine
from kvell.engine.lending.placement import NOBODY_LENDS
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from tests.async_engine.fault_cases import ACTS, LENDING_REFUSALS, SHAPES
from tests.async_engine.faults import REFUSALS
from tests.async_engine.handover_faults import (
    LENDING_KINDS,
    Faults,
    Outcome,
    Pair,
    anywhere,
    borrowing,
    check,
    disturbed,
    rested,
)
from tests.async_engine.jobs import Job
from tests.async_engine.lending_jobs import (
    KV_BYTES,
    everything,
    long_jobs,
    mixed_jobs,
    wide_model,
)

pytestmark = pytest.mark.long
FEW = ("pause creditor", "kill creditor", "kill debtor")
REASONS = (*REFUSALS, NOBODY_LENDS, "the instances can hold together")
LIMITS = FrontLimits(
    drain_seconds=60, silence_seconds=6.0, restart=RestartPolicy(0.05, 0.5, attempts=1000)
)
MANY_SECONDS = 4000
MANY = tuple(itertools.islice(itertools.cycle(LENDING_KINDS), 100))
FORTY = MANY[:40]
Find = Callable[[AsyncEngine], list[Pair]]


def run(
    settings: dict[str, Any], jobs: Sequence[Job], kinds: Sequence[str], find: Find,
    refusals: Sequence[str], seconds: float, streams: int, seed: int,
) -> Outcome:  # fmt: skip
    make = partial(Faults, find=find, most_stopped_seconds=4.0)
    # one that wakes may find that what it read was recalled and taken back: after two seconds

    async def scenario() -> Outcome:
        async with asyncio.timeout(seconds), AsyncEngine(**settings, limits=LIMITS) as engine:
            outcome = await disturbed(engine, jobs, kinds, streams, seed, make=make)
            await rested(engine)
            return outcome

    outcome = asyncio.run(scenario())
    check(outcome, kinds, refusals)
    return outcome


@pytest.fixture(scope="module")
def wide(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(smollm2_path, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def long(wide: Path) -> list[Job]:
    return long_jobs(wide)


@pytest.mark.timeout(MANY_SECONDS + 100)
@pytest.mark.parametrize(("kinds", "seconds"), [(FEW, 400), (MANY, MANY_SECONDS)])
def test_faults_of_debtors_and_creditors(
    wide: Path, long: list[Job], kinds: Sequence[str], seconds: float
) -> None:
    settings: dict[str, Any] = {"model": str(wide), "dtype": "float32", "instances": "mixed=4"}
    settings["kv_memory_bytes"] = KV_BYTES
    run(settings, long, kinds, borrowing, LENDING_REFUSALS, seconds, 5, len(kinds))


@pytest.fixture(scope="module")
def settings(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(smollm2_path, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def mixed(settings: dict[str, Any]) -> list[Job]:
    return mixed_jobs(Path(settings["model"]))


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("instances", SHAPES)
def test_forty_faults_of_instances_with_every_mechanism(
    settings: dict[str, Any], mixed: list[Job], instances: str, seed: int
) -> None:
    shaped = settings | {"instances": instances}
    outcome = run(shaped, mixed, FORTY, anywhere, REASONS, 1500, 8, seed)
    sought = [act for act in ACTS if act != "moved" or instances.startswith("prefill")]
    assert [act for act in sought if not outcome.acts[act]] == []
