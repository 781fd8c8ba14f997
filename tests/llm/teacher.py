"""What transformers thinks of a text: one pass over all of its tokens."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from kvell.engine.sampling.controls import adjust, permitted_tokens
from kvell.llm import LLM, RequestOutput
from kvell.models.sources.packaged import MODEL_NAME
from kvell.vocabulary import MIB

MAX_ERROR = 1e-3
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "near": {"type": "array", "items": {"enum": ["sea", "hills"]}, "maxItems": 2},
    },
    "required": ["city", "size", "near"],
    "additionalProperties": False,
}
FORM = StructuredOutputs(json=json.dumps(SCHEMA))
THOUGHT_FORM = replace(FORM, reasoning=Reasoning((".",)))
"""The model writes a sentence first, as it likes."""
PERIOD = {30: 18.0}
"""Bias by which a shallow model says its first "." after some words."""
WISHES: list[SamplingParams] = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.4, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=40, structured_outputs=FORM, logprobs=0),
    SamplingParams(
        temperature=0.9,
        seed=8,
        max_tokens=12,
        min_p=0.2,
        prompt_logprobs=1,
        allowed_token_ids=tuple(range(200, 9000)),
    ),
    SamplingParams(
        temperature=0, max_tokens=12, presence_penalty=1.2, frequency_penalty=0.6, min_tokens=12
    ),
    SamplingParams(
        temperature=0,
        max_tokens=12,
        logit_bias={260: 4.0},
        bad_words_token_ids=((28,), (198, 504)),
        logprobs=1,
    ),
    SamplingParams(
        temperature=1, seed=4, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z ]*")
    ),
    SamplingParams(
        temperature=0,
        max_tokens=60,
        structured_outputs=THOUGHT_FORM,
        logit_bias=PERIOD,
        logprobs=0,
    ),
]
"""Plain and controlled requests, for one batch."""


@cache
def model_at(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@cache
def _logits(path: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model_at(path)(torch.tensor([tokens])).logits[0]
    return logits


def logits_of(path: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logits behind each token, float32 [tokens, vocabulary]."""
    return _logits(path, tuple(tokens))


def smollm2(path: Path, **options: Any) -> LLM:
    options = {"kv_memory_bytes": 64 * MIB} | options
    return LLM(MODEL_NAME, dtype="float32", cache_dir=path.parent, **options)


def assert_likely(
    told: Sequence[TokenLogprobs], tokens: Sequence[int], logits: torch.Tensor, most: int
) -> None:
    """Check what was told of tokens against the logits of the places before them."""
    assert len(told) == len(tokens) == len(logits)
    for one, token, row in zip(told, tokens, logits.log_softmax(-1), strict=True):
        assert abs(one.logprob - float(row[token])) < MAX_ERROR
        low, high = (int((row > row[token] + gap).sum()) + 1 for gap in (MAX_ERROR, -MAX_ERROR))
        assert low <= one.rank <= high
        likeliest = row.topk(most).values if most else row[:0]
        assert len(one.top) == most
        for (other, logprob), best in zip(one.top, likeliest, strict=True):
            assert abs(logprob - float(row[other])) < MAX_ERROR
            assert abs(logprob - float(best)) < MAX_ERROR


def assert_output_likely(path: Path, output: RequestOutput, most: int) -> None:
    assert output.logprobs is not None
    known = len(output.prompt_token_ids)
    logits = logits_of(path, output.prompt_token_ids + output.token_ids)
    assert_likely(output.logprobs, output.token_ids, logits[known - 1 : -1], most)


def assert_prompt_likely(path: Path, output: RequestOutput, most: int) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    logits = logits_of(path, prompt + output.token_ids)[: len(prompt) - 1]
    first, *others = output.prompt_logprobs
    assert first is None
    told = []
    for token, position in zip(prompt[1:], others, strict=True):
        assert position is not None
        top = sorted((one.rank, other, one.logprob) for other, one in position.items())
        likeliest = tuple((other, logprob) for _, other, logprob in top[:most])
        told.append(TokenLogprobs(position[token].logprob, position[token].rank, likeliest))
    assert_likely(told, prompt[1:], logits, most)


def greedy_choices(path: Path, output: RequestOutput, params: SamplingParams) -> list[int]:
    """The likeliest token at each place of an output, after penalties by transformers' logits."""
    prompt, made = output.prompt_token_ids, output.token_ids
    rows = logits_of(path, prompt + made)[len(prompt) - 1 : -1].clone()
    for index, row in enumerate(rows):
        adjust(row, params, np.array(prompt + made[:index], np.int32), len(prompt))
        so_far = np.array(made[:index], np.int32)
        row[~torch.from_numpy(permitted_tokens(params, so_far, len(row)))] = -torch.inf
    return [int(token) for token in rows.argmax(-1)]
