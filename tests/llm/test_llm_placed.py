"""Instances that machines keep, with a real model and without Ray; and a drain during a move."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.command import instance_command, placed_command
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.placing.launcher import PROGRAM
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.front import Front
from kvell.front.request_log import LogEntry
from tests.engine.works import spec_of
from tests.fleet.placing.host_placement import HostPlacement
from tests.fleet.placing.placed_front import placed_front
from tests.front.scenarios import run, until

DATA = Path(__file__).parents[1] / "data"
ROWS = [json.loads(row) for row in (DATA / "smollm2_greedy.jsonl").read_text().splitlines()][:12]
SETTINGS = EngineSettings("smollm2", kv_memory_bytes=64 << 20, dtype="float32")
PATIENCE_SECONDS = 240.0


@asynccontextmanager
async def apart() -> AsyncIterator[Front]:
    secret = secrets.token_bytes(32)
    # Machines with another address than the front's: peers must come back to that one.
    site = ClusterSite(
        HostPlacement(secret, PROGRAM, "127.0.0.3"), secret, "test", PATIENCE_SECONDS
    )
    command, counts = placed_command(SETTINGS), {"prefill": 1, "decode": 1}
    async with placed_front(command, counts, FrontLimits(), site, secret) as (front, _):
        yield front


async def tokens_of(front: Front, row: dict[str, Any]) -> list[int]:
    prompt = np.array(row["prompt_token_ids"], np.int32)
    found: list[int] = []
    async for output in front.generate(
        spec_of(prompt, SamplingParams(max_tokens=64, temperature=0.0))
    ):
        found += output.token_ids
    return found


async def all_of(front: Front) -> list[list[int]]:
    return list(await asyncio.gather(*(tokens_of(front, row) for row in ROWS)))


async def moved(front: Front) -> int:
    return (await front.stats())["prefill-0"].finished.get("moved", 0)


@pytest.mark.long  # `tests/fleet/placing` has it without a model
def test_requests_cross_and_cross_again_to_the_next_incarnation(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front tells where each listens, and tells it again when one listens elsewhere."""
    monkeypatch.setenv("KVELL_CACHE_DIR", str(smollm2_path.parent))
    expected = [row["token_ids"] for row in ROWS]

    async def scenario() -> None:
        async with apart() as front:
            told = {one.instance_id: one for one, _ in front.instances()}
            listens = {
                name: one.report.facts.pool_address for name, one in told.items() if one.report
            }
            assert len(set(listens.values())) == 2
            assert all(one.startswith("tcp://127.0.0.3:") for one in listens.values())
            assert await all_of(front) == expected
            crossed = await moved(front)
            assert crossed > len(ROWS) // 2

            asked = asyncio.create_task(all_of(front))
            await until(lambda: front.in_flight > 0)
            pid = told["decode-0"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert await asked == expected
            await until(lambda: all(one.state == "serving" for one, _ in front.instances()))
            crossed = await moved(front)
            assert await all_of(front) == expected
            assert await moved(front) > crossed

    run(scenario(), PATIENCE_SECONDS)


PROMPT = np.random.default_rng(5).integers(100, 40_000, 300).astype(np.int32)
"""It takes several steps, so that there is time to begin draining."""


async def answer(front: Front, salt: str, max_tokens: int = 24) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async for output in front.generate(spec_of(PROMPT, sampling, cache_salt=salt)):
        tokens += output.token_ids
        if output.finished is not None:
            return tokens, output.finished
    raise AssertionError("it had no end")


def entries_at(front: Front, instance: str) -> list[LogEntry]:
    return [one for one in front.entries().in_flight if one.line == instance]


@pytest.mark.long  # `tests/front/test_front_moving.py` has it without processes
def test_a_request_on_its_way_to_an_instance_that_drains_is_computed_once(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance has another request, so that it lives on while it drains."""
    monkeypatch.setenv("KVELL_CACHE_DIR", str(smollm2_path.parent))

    async def scenario() -> None:
        counts = {"prefill": 1, "decode": 1}
        command = instance_command(SETTINGS)
        async with Front(command, instances=counts, pool=PoolSettings()) as front:
            expected, _ = await answer(front, "before")
            other = asyncio.create_task(answer(front, "other", 240))
            await until(lambda: bool(entries_at(front, "decode-0")))
            asked = asyncio.create_task(answer(front, "again"))
            on_its_way: list[LogEntry] = []

            def has_set_out() -> bool:
                on_its_way[:] = [one for one in entries_at(front, "prefill-0") if one.goes_to]
                return bool(on_its_way)

            await until(has_set_out)
            assert not on_its_way[0].output, "its prompt is being computed"
            await front.drain("decode-0")
            tokens, finished = await asked
            assert tokens == expected
            assert (finished.reason, finished.attempt) == ("length", 0), "no second attempt"
            assert len((await other)[0]) == 240
            await until(lambda: len(front.instances()) == 1)
            told = await front.stats(with_audit=True)
            assert not told["prefill-0"].problems and not told["prefill-0"].running
            assert told["prefill-0"].prompt_tokens == 3 * len(PROMPT), "no prompt twice"

    run(scenario(), PATIENCE_SECONDS)
