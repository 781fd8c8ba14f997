"""An instance is taken out of service while a request is on its way there: real processes."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.command import instance_command
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.front import Front
from kvell.front.request_log import LogEntry
from tests.engine.works import spec_of
from tests.front.scenarios import run, until

SETTINGS = EngineSettings("smollm2", kv_memory_bytes=64 << 20, dtype="float32")
PATIENCE_SECONDS = 240.0
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
