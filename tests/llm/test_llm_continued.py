"""Controlled requests that begin with an earlier attempt's output go on as that one would have."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from jsonschema import validate

from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.llm import LLM
from kvell.serving.lone import LocalInstance
from kvell.vocabulary import RequestId
from tests.llm.exactness import read_oracle
from tests.llm.teacher import FORM, MAX_ERROR, PERIOD, SCHEMA, THOUGHT_FORM, smollm2

PROMPT = min((answer.prompt for answer in read_oracle()), key=lambda ids: abs(len(ids) - 16))
PENALISED = SamplingParams(
    temperature=0,
    max_tokens=10,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    min_tokens=10,
    logprobs=2,
)
FORMED = SamplingParams(temperature=0, max_tokens=40, structured_outputs=FORM, logprobs=1)
CHOSEN = SamplingParams(
    temperature=1,
    seed=2,
    max_tokens=9,
    structured_outputs=StructuredOutputs(choice=("unbelievable", "understandable")),
    logprobs=0,
)
THOUGHT = SamplingParams(
    temperature=0,
    max_tokens=64,
    structured_outputs=THOUGHT_FORM,
    logit_bias=PERIOD,
    logprobs=1,
)
SCORED = SamplingParams(temperature=0.7, seed=2, max_tokens=6, prompt_logprobs=1, min_p=0.1)
WISHES = {
    "penalties": PENALISED,
    "schema": FORMED,
    "choice": CHOSEN,
    "reasoning": THOUGHT,
    "scores": SCORED,
}


@dataclass
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    first_index: int
    finished: Finished


@pytest.fixture(scope="module")
def llm(shallow_path: Path) -> LLM:
    return smollm2(shallow_path, max_model_len=256)


def answered(llm: LLM, name: str, sampling: SamplingParams, output: list[int]) -> Answer:
    instance = LocalInstance(llm.engine)
    prompt, made = (np.array(ids, "<i4").tobytes() for ids in (PROMPT, output))
    attempt = int(bool(output))
    instance.send(
        Submit(RequestSpec(RequestId(name), prompt, sampling), attempt=attempt, output=made)
    )
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    scores: list[TokenLogprobs] = []
    first = -1
    while instance.has_work():
        for event in instance.poll():
            if isinstance(event, PromptLogprobs):
                scores += event.logprobs
            elif isinstance(event, Tokens):
                first = event.first_index if first < 0 else first
                tokens += event.token_ids
                logprobs += event.logprobs
            elif isinstance(event, Finished):
                return Answer(tokens, logprobs, scores, first, event)
    raise AssertionError("no end came")


def assert_near(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one.logprob - other.logprob) < MAX_ERROR
        assert len(one.top) == len(other.top)


LATE = ("schema", "reasoning")
"""Long answers; below, each goes on once as well."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind in LATE else ()) for kind in WISHES],
)
def test_the_rest_is_the_same(llm: LLM, kind: str) -> None:
    sampling = WISHES[kind]
    whole = answered(llm, f"{kind}-whole", sampling, [])
    count = len(whole.token_ids)
    assert len(whole.logprobs) == (0 if sampling.logprobs is None else count)
    for known in sorted({1, 2, count // 2, count - 1}):
        rest = answered(llm, f"{kind}-{known}", sampling, whole.token_ids[:known])
        assert rest.first_index == known
        assert rest.token_ids == whole.token_ids[known:]
        assert (rest.finished.reason, rest.finished.output_tokens) == (whole.finished.reason, count)
        assert_near(rest.logprobs, whole.logprobs[known:])
        assert len(rest.prompt_logprobs) == len(whole.prompt_logprobs)
        assert_near(rest.prompt_logprobs, whole.prompt_logprobs)


def test_what_goes_on_obeys_its_grammar(llm: LLM) -> None:
    """Also where the first attempt said what the model would never have chosen."""
    begun = '{"city": "Ulm", "size": '
    output = llm.tokenizer.encode(begun).tolist()
    answer = answered(llm, "begun", FORMED, output)
    text = llm.tokenizer.decode([*output, *answer.token_ids])
    assert text.startswith(begun)
    assert answer.finished.reason == "stop"
    validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("offsets", [(0,), pytest.param((-1, 0, 1, 2), marks=pytest.mark.long)])
def test_what_goes_on_anywhere_in_its_reasoning_or_behind_it_obeys_its_grammar(
    llm: LLM, offsets: tuple[int, ...]
) -> None:
    whole = answered(llm, "thought-whole", THOUGHT, [])
    text = llm.tokenizer.decode(whole.token_ids)
    validate(json.loads(text.partition(".")[2]), SCHEMA)
    end = next(i for i, token in enumerate(whole.token_ids) if llm.tokenizer.decode([token]) == ".")
    assert 1 < end < len(whole.token_ids) - 2
    for known in (end + offset for offset in offsets):
        rest = answered(llm, f"thought-{known}", THOUGHT, whole.token_ids[:known])
        assert rest.token_ids == whole.token_ids[known:]


def test_scores_are_told_for_the_whole_prompt(llm: LLM) -> None:
    assert len(answered(llm, "scores", SCORED, []).prompt_logprobs) == len(PROMPT) - 1
