"""What ``kvell.LLM`` samples by where nothing is said: the model's own recommendations."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvell import LLM, SamplingParams
from kvell.models.loading.random_weights import write_random_model
from kvell.vocabulary import MIB
from tests.models.harness import tiny_config

PROMPT = {"prompt_token_ids": list(range(3, 20))}
RECOMMENDED = {"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recommending")
    write_random_model(path, tiny_config("LlamaForCausalLM"), seed=1)
    file = path / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | RECOMMENDED))
    return path


def opened(directory: Path, **settings: Any) -> LLM:
    return LLM(str(directory), kv_memory_bytes=4 * MIB, dtype="float32", **settings)


def test_the_models_recommendations_are_taken(directory: Path) -> None:
    llm = opened(directory)
    expected = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=3)
    assert llm.get_default_sampling_params() == expected
    [usual] = llm.generate(PROMPT)
    [said] = llm.generate(PROMPT, expected)
    assert usual.token_ids == said.token_ids
    [own] = llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    assert len(own.token_ids) == 16, "what is said is not mixed with them"


def test_nobody_must_take_them(directory: Path) -> None:
    assert opened(directory, generation_config="vllm").get_default_sampling_params() == (
        SamplingParams()
    )
