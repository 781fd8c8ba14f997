"""An instance process whose model raises for one request's token: the others go on."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.command import instance_command
from kvell.front.front import Front
from kvell.llm import LLM
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.engine.works import spec_of
from tests.llm.broken_models import write_model
from tests.llm.guilty_instance import GUILTY, raising

PARAMS = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
INNOCENT = [[(i * 5 + j) % 60 for j in range(20 + i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "guilty", smollm2_path)


async def answer(
    front: Front, prompt: Sequence[int], began: asyncio.Event | None = None
) -> tuple[list[int], Finished]:
    """A prompt's tokens and end; ``began`` is set at the first token."""
    tokens: list[int] = []
    async for output in front.generate(spec_of(np.asarray(prompt, np.int32), PARAMS)):
        tokens += output.token_ids
        if began is not None and tokens:
            began.set()
        if output.finished is not None:
            return tokens, output.finished
    raise AssertionError("no end was told")


@pytest.mark.parametrize(
    "ahead", [False, pytest.param(True, marks=pytest.mark.long)], ids=["in-turn", "ahead"]
)
def test_a_step_that_raises_ends_its_guilty_request_only(model: Path, ahead: bool) -> None:
    settings = EngineSettings(
        str(model), kv_memory_bytes=16 * MIB, dtype="float32", async_scheduling=ahead
    )
    script = str(Path(__file__).with_name("guilty_instance.py"))
    command = [sys.executable, script, *instance_command(settings)[3:]]

    async def run() -> None:
        async with Front(command) as front:
            undisturbed = [(await answer(front, prompt))[0] for prompt in INNOCENT]
            [(before, _)] = front.instances()
            began = [asyncio.Event() for _ in INNOCENT]
            streams = [
                asyncio.create_task(answer(front, prompt, event))
                for prompt, event in zip(INNOCENT, began, strict=True)
            ]
            for event in began:
                await event.wait()
            _, ended = await answer(front, [1, 2, GUILTY, 3])
            assert ended.reason == "error"
            assert "a step failed (ValueError)" in ended.message
            assert "secret" not in ended.message
            answers = [await stream for stream in streams]
            assert [tokens for tokens, _ in answers] == undisturbed
            assert {end.reason for _, end in answers} == {"length"}
            assert max(end.attempt for _, end in answers) > 0, "no step of theirs failed"
            [(after, _)] = front.instances()
            assert (after.pid, after.restarts) == (before.pid, before.restarts)
            [stats] = (await front.stats(with_audit=True)).values()
            assert stats.problems == ()
            assert (stats.running, stats.waiting) == (0, 0)

    asyncio.run(run())


def test_in_one_process_the_error_is_raised_and_the_engine_serves_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(model), kv_memory_bytes=16 * MIB, dtype="float32")
    sound = [{"prompt_token_ids": prompt} for prompt in INNOCENT]
    expected = [one.token_ids for one in llm.generate(sound, PARAMS)]
    monkeypatch.setattr(PagedModel, "forward", raising(PagedModel.forward))
    with pytest.raises(ValueError, match="secret"):
        llm.generate([*sound, {"prompt_token_ids": [GUILTY]}], PARAMS)
    assert [one.token_ids for one in llm.generate(sound, PARAMS)] == expected
    assert llm.engine.core.audit() == ()
