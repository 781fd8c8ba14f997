"""How likely prompts and answers are, against transformers: in chunks, in crowds, and cached."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM
from kvell.serving.lone import LocalInstance
from kvell.vocabulary import RequestId
from tests.llm.exactness import read_oracle
from tests.llm.teacher import assert_output_likely, assert_prompt_likely, smollm2

ASKING = SamplingParams(temperature=0, max_tokens=5, logprobs=4, prompt_logprobs=2, ignore_eos=True)
PROMPTS = [answer.prompt for answer in sorted(read_oracle(), key=lambda a: len(a.prompt))[2:10:2]]
"""8 to 37 tokens."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        pytest.param({"max_num_seqs": 2}, marks=pytest.mark.long),
    ],
    ids=["whole", "chunks", "two seats"],
)
def test_prompts_and_answers_are_as_likely_as_transformers_says(
    shallow_path: Path, options: dict[str, Any]
) -> None:
    for output in smollm2(shallow_path, **options).generate(PROMPTS, ASKING):
        assert_output_likely(shallow_path, output, 4)
        assert_prompt_likely(shallow_path, output, 2)


def test_a_prompt_that_is_cached_is_scored_as_well(shallow_path: Path, llm: LLM) -> None:
    prompt = PROMPTS[-1]
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for _ in range(2):
        [known] = llm.generate([prompt], plain)
        [output] = llm.generate([prompt], ASKING)
        assert output.token_ids == known.token_ids
        assert output.cached_tokens == 0
        assert_prompt_likely(shallow_path, output, 2)
        assert_output_likely(shallow_path, output, 4)
    assert known.cached_tokens == len(prompt) - 1


def test_each_is_told_what_it_asked_for(shallow_path: Path, llm: LLM) -> None:
    asked = [
        SamplingParams(temperature=0, max_tokens=3, logprobs=0),
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=1, seed=1, max_tokens=3, logprobs=20),
    ]
    first, second, third, fourth = llm.generate([PROMPTS[0]] * 4, asked)
    assert_output_likely(shallow_path, first, 0)
    assert_prompt_likely(shallow_path, second, 0)
    assert_output_likely(shallow_path, fourth, 20)
    assert [first.prompt_logprobs, second.logprobs, third.logprobs] == [None] * 3
    assert third.prompt_logprobs is fourth.prompt_logprobs is None


def test_a_prompt_of_one_token_has_nothing_to_score(shallow_path: Path, llm: LLM) -> None:
    [output] = llm.generate([[7042]], ASKING)
    assert output.prompt_logprobs == [None]
    assert_output_likely(shallow_path, output, 4)


def test_likelihood_is_the_models_own_whatever_is_wished(shallow_path: Path, llm: LLM) -> None:
    wishing = replace(ASKING, logit_bias={260: 50.0}, repetition_penalty=1.5)
    [output] = llm.generate([PROMPTS[1]], wishing)
    assert 260 in output.token_ids
    assert_output_likely(shallow_path, output, 4)


@pytest.mark.long
def test_prompts_scored_in_a_small_pool_are_told_once(shallow_path: Path) -> None:
    llm = smollm2(shallow_path, kv_memory_bytes=700 << 10, max_model_len=100)
    outputs = llm.generate(PROMPTS[2:] * 2, replace(ASKING, max_tokens=20))
    assert sum(output.preemptions for output in outputs) > 0
    for output in outputs:
        assert_prompt_likely(shallow_path, output, 2)
        assert_output_likely(shallow_path, output, 4)


def test_scores_come_before_the_first_token(shallow_path: Path) -> None:
    llm = smollm2(shallow_path, max_num_batched_tokens=16)
    instance, events = LocalInstance(llm.engine), list[object]()
    ids = np.asarray(PROMPTS[-1], "<i4").tobytes()
    instance.send(Submit(RequestSpec(RequestId("scored"), ids, ASKING)))
    while instance.has_work():
        events += instance.poll()
    told = [event for event in events if isinstance(event, PromptLogprobs | Tokens)]
    scored = [event for event in told if isinstance(event, PromptLogprobs)]
    assert told[: len(scored)] == scored
    firsts = [event.first_index for event in scored]
    ends = [event.first_index + len(event.logprobs) for event in scored]
    assert [1, *ends[:-1]] == firsts
    assert ends[-1] == len(PROMPTS[-1])
    assert len(scored) > 1
