"""Draft tokens under grammars, penalties, budgets and logprobs: the same answers in fewer steps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import (
    Reasoning,
    ReasoningBudget,
    StructuredOutputs,
)
from kvell.engine.sampling import grammars as mask_patience
from kvell.llm import LLM, RequestOutput
from kvell.models.sources.packaged import MODEL_NAME
from tests.llm.teacher import MAX_ERROR, SCHEMA, smollm2
from tests.models.cases import long_unless

PLACE = '{"city": "Rome", "size": 12, "near": ["sea"]}'
PLACES = f"[{', '.join([PLACE] * 6)}]"
PROMPT = f"The places as JSON, again and again: {PLACES}, {PLACES}. The places again: "
LIST = StructuredOutputs(
    json=json.dumps({"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3})
)
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.5, seed=11, max_tokens=60, ignore_eos=True)
FEATURES: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": LIST, "ignore_eos": False},
    "regex": {"structured_outputs": StructuredOutputs(regex='(\\{"city": "[A-Z][a-z]+"\\}, )*')},
    "lark": {
        "structured_outputs": StructuredOutputs(
            grammar='start: (item ", ")*\nitem: "[" NAME "]"\nNAME: /[a-z]{2,4}/'
        )
    },
    "schema after reasoning": {
        "structured_outputs": replace(LIST, reasoning=Reasoning((".",))),
        "logit_bias": {30: 18.0},
        "ignore_eos": False,
    },
    "schema after a budget": {
        "structured_outputs": replace(LIST, reasoning=Reasoning((".",))),
        "reasoning_budget": ReasoningBudget(10, 30),
        "ignore_eos": False,
    },
    "schema and lists": {
        "structured_outputs": LIST,
        "repetition_penalty": 1.05,
        "bad_words": ("Rome",),
        "logprobs": 1,
        "min_tokens": 20,
        "ignore_eos": False,
    },
    "repetition penalty": {"repetition_penalty": 1.05},
    "penalties": {"presence_penalty": 0.2, "frequency_penalty": 0.05},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 0, "logprobs": 0},
    "biases": {"logit_bias": {28: 2.0, 198: -5.0}},
    "bad words": {"bad_words": ("Paris", "size")},
    "budget": {"reasoning_budget": ReasoningBudget(24, 30)},
}

FAST = [("schema", GREEDY), ("penalties", SEEDED), ("schema after a budget", GREEDY)]


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """No mask is late, so that the same draft tokens are verified in every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_patience, "PATIENCE_SHARE", 1e9)
        patch.setattr(mask_patience, "MOST_PATIENCE_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def plain(shallow_path: Path) -> LLM:
    return smollm2(shallow_path)


@pytest.fixture(scope="module")
def looking_up(shallow_path: Path) -> LLM:
    return smollm2(shallow_path, num_speculative_tokens=4, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def drafting(shallow_path: Path) -> LLM:
    return smollm2(shallow_path, num_speculative_tokens=3, speculative_model=MODEL_NAME)


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    assert one.token_ids == other.token_ids
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    assert (one.logprobs is None) == (other.logprobs is None)
    for mine, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
        assert abs(mine.logprob - expected.logprob) < MAX_ERROR
        assert mine.rank == expected.rank


def assert_drafted(llm: LLM, plain: LLM, params: SamplingParams) -> None:
    """The answer is the same, in fewer steps."""
    counts, outputs = [], []
    for one in (plain, llm):
        before = one.engine.core.stats()
        [output] = one.generate(PROMPT, params)
        after = one.engine.core.stats()
        outputs.append(output)
        counts.append(
            (
                after.step - before.step,
                after.spec_decode_draft_tokens - before.spec_decode_draft_tokens,
                after.spec_decode_accepted_tokens - before.spec_decode_accepted_tokens,
            )
        )
    assert_same(outputs[1], outputs[0])
    (plain_steps, none, _), (steps, drafted, accepted) = counts
    assert none == 0 < accepted <= drafted
    assert steps < plain_steps


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("feature", FEATURES)
def test_looked_up_draft_tokens_change_no_answer(
    looking_up: LLM, plain: LLM, feature: str, sampling: SamplingParams
) -> None:
    assert_drafted(looking_up, plain, replace(sampling, **FEATURES[feature]))


@pytest.mark.parametrize(
    ("feature", "sampling"),
    [
        pytest.param(
            feature,
            sampling,
            marks=long_unless((feature, sampling) in FAST),
            id=f"{feature}-{'greedy' if sampling is GREEDY else 'seeded'}",
        )
        for feature in FEATURES
        for sampling in (GREEDY, SEEDED)
    ],
)
def test_draft_tokens_of_a_model_change_no_answer(
    drafting: LLM, plain: LLM, feature: str, sampling: SamplingParams
) -> None:
    assert_drafted(drafting, plain, replace(sampling, **FEATURES[feature]))


def test_all_together_answer_like_each_alone(looking_up: LLM, plain: LLM) -> None:
    wishes = [replace(GREEDY, **asked) for asked in FEATURES.values()]
    outputs = looking_up.generate([PROMPT] * len(wishes), wishes)
    expected = plain.generate([PROMPT] * len(wishes), wishes, sequential=True)
    for one, other in zip(outputs, expected, strict=True):
        assert_same(one, other)
