"""Guesses with a real model: the same answers in fewer steps; and who may guess for whom."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.models.loading.random_weights import write_random_model
from kvell.models.sources.packaged import MODEL_NAME
from kvell.vocabulary import MIB
from tests.llm.exactness import assert_same, cut, read_oracle
from tests.models.harness import tiny_config

VERSES = "The wind blows over the sea. The ship sails over the sea. The gull flies over the sea. "
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.4, seed=11, max_tokens=32)


def smollm2(cache: Path, **options: Any) -> LLM:
    options = {"kv_memory_bytes": 64 * MIB, "num_speculative_tokens": 4} | options
    return LLM(MODEL_NAME, dtype="float32", cache_dir=cache, **options)


def test_looked_up_draft_tokens_say_what_transformers_says(smollm2_path: Path) -> None:
    few = [cut(answer, 24) for answer in read_oracle()[10:14]]
    llm = smollm2(smollm2_path.parent)
    assert_same(llm.generate([answer.prompt for answer in few], GREEDY), few)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, pytest.param(SEEDED, marks=pytest.mark.long)],
    ids=["greedy", "seeded"],
)
def test_a_text_that_repeats_itself_takes_fewer_steps(
    shallow_path: Path, sampling: SamplingParams
) -> None:
    options = [{"num_speculative_tokens": n, "prompt_lookup_min": 1} for n in (0, 4)]
    plain, drafting = (smollm2(shallow_path.parent, **option) for option in options)
    (expected,), (output,) = (llm.generate(VERSES * 4, sampling) for llm in (plain, drafting))
    assert output.token_ids == expected.token_ids
    stats = drafting.engine.core.stats()
    assert 0 < stats.spec_decode_accepted_tokens < stats.spec_decode_draft_tokens
    assert stats.step == plain.engine.core.stats().step - stats.spec_decode_accepted_tokens


def test_a_model_draft_tokens_for_itself(smollm2_path: Path) -> None:
    few = [cut(answer, 12) for answer in read_oracle()[20:22]]
    llm = smollm2(smollm2_path.parent, speculative_model=MODEL_NAME)
    params = SamplingParams(temperature=0, max_tokens=12)
    assert_same(llm.generate([answer.prompt for answer in few], params), few)
    stats = llm.engine.core.stats()
    assert stats.spec_decode_accepted_tokens > 0.9 * stats.spec_decode_draft_tokens > 0
    assert [group.name for group in llm.contract.groups] == ["full", "draft-full"]


def test_a_draft_model_of_another_vocabulary_is_refused(shallow_path: Path, tmp_path: Path) -> None:
    other = write_random_model(tmp_path / "other", tiny_config("LlamaForCausalLM"), 1, scale=4.0)
    with pytest.raises(ChangeSomething, match="vocabulary of 509 tokens, the model one of") as told:
        smollm2(shallow_path.parent, speculative_model=str(other))
    assert told.value.field == "--speculative-model"


def test_a_draft_model_whose_tokens_have_other_names_is_refused(
    shallow_path: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(shallow_path / name, tmp_path)
    tokenizer = json.loads((shallow_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ChangeSomething, match="gives tokens other ids"):
        smollm2(shallow_path.parent, speculative_model=str(tmp_path))
