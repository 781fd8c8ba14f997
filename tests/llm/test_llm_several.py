"""A second model beside the packaged one, in Python."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import ModelLengths
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.models.sources.packaged import MODEL_NAME
from kvell.vocabulary import MIB
from tests.llm.exactness import assert_same, cut, read_oracle

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def opened(cache: Path, model: str, *beside: str, **options: Any) -> LLM:
    return LLM(
        model,
        beside=beside,
        kv_memory_bytes=64 * MIB,
        dtype="float32",
        cache_dir=cache,
        **options,
    )


@pytest.fixture(scope="module")
def both(smollm2_path: Path, small_model: Path) -> LLM:
    return opened(smollm2_path.parent, MODEL_NAME, f"small={small_model}")


def test_both_say_what_they_say_alone(smollm2_path: Path, small_model: Path, both: LLM) -> None:
    cache = smollm2_path.parent
    few = [cut(answer, 12) for answer in read_oracle()[:3]]
    texts = [answer.prompt for answer in few]
    alone = [one.token_ids for one in opened(cache, str(small_model)).generate(texts, PARAMS)]
    mixed = [{"prompt": text, "model": name} for text in texts for name in (MODEL_NAME, "small")]
    until_eos = replace(PARAMS, ignore_eos=False)
    outputs = both.generate(mixed, [until_eos, PARAMS] * len(texts))
    assert_same(outputs[::2], few)
    assert [one.token_ids for one in outputs[1::2]] == alone
    assert both.stats()["max_running"] == 6
    assert "".join(both.stream({"prompt": texts[0], "model": "small"}, PARAMS)) == outputs[1].text


def test_the_contract_names_both(both: LLM) -> None:
    lines = both.contract.lines()
    assert lines[0] == "memory contract for smollm2, small, float32"
    assert any(line.startswith("    small:sliding(9): 5 layers") for line in lines)
    assert any(line.startswith("  longest to small") and "256 tokens" in line for line in lines)
    assert both.engine.ready().facts.beside == {"small": ModelLengths(256)}


def test_a_chat_with_either(smollm2_path: Path, small_model: Path) -> None:
    llm = opened(smollm2_path.parent, f"big={MODEL_NAME}", f"small={small_model}")
    said = [{"role": "user", "content": "Name the capital of France."}]
    (first,), (named,), (other,) = (llm.chat(said, PARAMS, model=m) for m in ("", "big", "small"))
    assert "Paris" in first.text
    assert named.token_ids == first.token_ids != other.token_ids
    assert named.cached_tokens > 0 == other.cached_tokens


def test_a_model_that_is_not_there_is_named(both: LLM) -> None:
    with pytest.raises(ChangeSomething, match="use smollm2, small") as told:
        both.generate({"prompt": "Hi", "model": "large"}, PARAMS)
    assert told.value.field == "model"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_budget": "128"}, "which is served alone"),
    ],
)
def test_what_is_served_alone(
    smollm2_path: Path, small_model: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ChangeSomething, match=problem):
        opened(smollm2_path.parent, MODEL_NAME, f"small={small_model}", **options)
