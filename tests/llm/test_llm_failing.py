"""Logits that are NaN in one process: whichever code computes them, their request alone fails."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import RequestFailed
from kvell.llm import LLM
from kvell.vocabulary import MIB
from tests.llm.broken_models import POISON, write_broken, write_poisoned

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
SHARED = [(7 * i) % 500 for i in range(40)]
SOUND = [[*SHARED, *range(1, 2 + n)] for n in (0, 4, 9, 30)]
POISONED = [[*SHARED, POISON, *range(n)] for n in (0, 3, 50)]


@pytest.fixture(scope="module")
def models(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "poisoned": write_poisoned(directory / "poisoned", smollm2_path),
        "broken": write_broken(directory / "broken", smollm2_path),
    }


def opened(path: Path, **options: Any) -> LLM:
    return LLM(str(path), kv_memory_bytes=8 * MIB, **{"dtype": "float32"} | options)


def prompts(many: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in many]


OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "ahead": {"dtype": "bfloat16", "async_scheduling": True},
    "modules": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 32},
    "drafts": {"num_speculative_tokens": 3},
}
SAMPLING = {"greedy": GREEDY, "drawn": DRAWN}
SOON = {"compiled-greedy", "ahead-drawn", "modules-greedy", "chunks-greedy", "drafts-drawn"}


@pytest.mark.parametrize(
    ("options", "params"),
    [
        pytest.param(options, params, id=name, marks=() if name in SOON else pytest.mark.long)
        for kind, options in OPTIONS.items()
        for drawn, params in SAMPLING.items()
        for name in [f"{kind}-{drawn}"]
    ],
)
def test_others_in_the_batch_and_in_its_pages_are_not_disturbed(
    models: dict[str, Path], options: dict[str, Any], params: SamplingParams
) -> None:
    undisturbed = opened(models["poisoned"], **options).generate(prompts(SOUND), params)
    expected = [one.token_ids for one in undisturbed]
    llm = opened(models["poisoned"], **options)
    for one in llm.generate(prompts(POISONED), params):
        assert (one.finish_reason, one.token_ids) == ("error", [])
        assert "not numbers" in one.error
    mixed = llm.generate(prompts([*POISONED, *SOUND, *POISONED]), params)
    assert [one.finish_reason for one in mixed] == ["error"] * 3 + ["length"] * 4 + ["error"] * 3
    assert [one.token_ids for one in mixed[3:7]] == expected
    again = llm.generate(prompts(SOUND), params)
    assert [one.token_ids for one in again] == expected
    assert all(one.cached_tokens for one in again)
    assert llm.engine.core.audit() == ()


def test_a_draft_model_that_gives_nan_changes_no_answer(models: dict[str, Path]) -> None:
    plain = opened(models["poisoned"]).generate(prompts(SOUND), GREEDY)
    drafted = opened(
        models["poisoned"], speculative_model=str(models["broken"]), num_speculative_tokens=2
    ).generate(prompts(SOUND), GREEDY)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def test_vectors_streams_and_scores_say_so_too(models: dict[str, Path]) -> None:
    llm = opened(models["poisoned"])
    with pytest.raises(RequestFailed, match="vector is not numbers"):
        llm.embed(prompts([SHARED, [1, POISON]]))
    with pytest.raises(RequestFailed, match="not numbers"):
        list(llm.stream({"prompt_token_ids": [1, POISON]}, GREEDY))
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=1)
    bad, good = llm.generate(prompts([[1, POISON, 2], SHARED]), scored)
    assert bad.finish_reason == "error"
    positions = [position.values() for position in bad.prompt_logprobs or [] if position]
    assert not any(np.isnan(one.logprob) for position in positions for one in position)
    assert good.logprobs is not None
    assert np.isfinite([one.logprob for one in good.logprobs]).all()
    [vector] = llm.embed(prompts([SHARED]))
    assert np.isfinite(vector.embedding).all()
