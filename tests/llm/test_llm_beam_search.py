"""``LLM.beam_search`` against transformers' beams, and whose pages beams and choices share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvell.engine.engine import Engine
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.beam_search import BeamSearch, BeamSearchParams
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.memory import GroupKind
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import RequestId
from tests.llm.exactness import read_oracle, small_engine
from tests.llm.teacher import model_at

PROMPTS = [answer.prompt for answer in sorted(read_oracle(), key=lambda a: len(a.prompt))[3:10:3]]
"""9 to 37 tokens."""

ENDS = (30, 28, 198, 260)
"""Tokens that end answers soon: a dot, a comma, a new line, an article."""


def transformers_beams(path: Path, prompt: list[int], params: BeamSearchParams) -> tuple[Any, Any]:
    """Answers without what fills them up, and their scores."""
    model = model_at(path)
    end = model.generation_config.eos_token_id
    given = torch.tensor([prompt])
    told = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=[*params.stop_token_ids, *([end] if isinstance(end, int) else end)],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, indices in zip(told.sequences, told.beam_indices, strict=True):
        length = int((indices >= 0).sum())
        answers.append(row[len(prompt) : len(prompt) + length].tolist())
    return answers, told.sequences_scores


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (PROMPTS[:2], BeamSearchParams(4, 8)),
        pytest.param(
            PROMPTS[1:2],
            BeamSearchParams(3, 14, stop_token_ids=ENDS, length_penalty=0.5),
            marks=pytest.mark.long,
        ),
        pytest.param(
            PROMPTS[:1],
            BeamSearchParams(4, 10, stop_token_ids=ENDS[:2], early_stopping=True),
            marks=pytest.mark.long,
        ),
        pytest.param(
            PROMPTS[1:2],
            BeamSearchParams(
                4, 9, stop_token_ids=ENDS[:1], early_stopping="never", length_penalty=2.0
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            PROMPTS[:1],
            BeamSearchParams(2, 8, stop_token_ids=ENDS, min_tokens=4),
            marks=pytest.mark.long,
        ),
        (PROMPTS[:1], BeamSearchParams(10, 3, length_penalty=0.0)),
    ],
    ids=["plain", "ends", "early", "never", "least", "wide"],
)
def test_beams_are_those_of_transformers(
    llm: LLM, shallow_path: Path, prompts: list[list[int]], params: BeamSearchParams
) -> None:
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        assert found.prompt_token_ids == prompt
        answers, scores = transformers_beams(shallow_path, prompt, params)
        assert [one.token_ids for one in found.sequences] == answers
        assert [one.score for one in found.sequences] == pytest.approx(scores.tolist(), abs=1e-4)
        for one in found.sequences:
            assert one.text == llm.tokenizer.decode(one.token_ids)


def test_one_beam_is_the_greedy_answer(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
    for answer, found in zip(greedy, llm.beam_search(PROMPTS, BeamSearchParams(1, 6)), strict=True):
        [sequence] = found.sequences
        assert (sequence.token_ids, sequence.text) == (answer.token_ids, answer.text)
        assert sequence.finish_reason == answer.finish_reason


def step(engine: Engine, prompt: bytes, search: BeamSearch) -> tuple[BeamSearch, int, int]:
    """The search a token on, prompt tokens that were computed, and full pages with anything."""
    told: dict[str, TokenLogprobs] = {}
    computed = 0
    groups = engine.core.memory.layout.groups
    full = next(i for i, group in enumerate(groups) if group.kind is GroupKind.FULL)
    for index, beam in enumerate(search.running):
        name = RequestId(f"{len(beam.token_ids)}-{index}")
        text = prompt + np.array(beam.token_ids, "<i4").tobytes()
        assert is_accepted(engine.handle(Submit(RequestSpec(name, text, search.sampling()))))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                told[event.request_id] = event.logprobs[0]
            if isinstance(event, Finished):
                assert event.reason == "length"
                computed += event.prompt_tokens - event.cached_tokens
    order = sorted(told, key=lambda name: int(name.split("-")[1]))
    pages = engine.core.memory.totals().cached_pages[full]
    return search.after([told[name] for name in order]), computed, pages


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_step_computes_a_token_of_each_beam_and_takes_a_page_for_it(architecture: str) -> None:
    """Of 40 tokens two pages are full; the third is copied for each beam that goes on in it."""
    engine = small_engine(architecture, 4096, 256)[0]
    prompt = np.random.default_rng(3).integers(3, 509, 40).astype("<i4").tobytes()
    search = BeamSearch.of(BeamSearchParams(4, 8), frozenset())
    counts = []
    while not search.is_over:
        search, *told = step(engine, prompt, search)
        counts.append(tuple(told))
    assert counts == [(40, 3)] + [(4, 3 + 4 * taken) for taken in range(1, 8)]


def test_what_does_not_go_with_beams_is_refused_before_any_is_run(llm: LLM) -> None:
    before = llm.engine.core.stats().step
    pictured: Any = {"prompt_token_ids": [1, 2], "images": {"pixel_values": torch.zeros(1)}}
    for prompt, params, field in (
        ([1] * 9000, BeamSearchParams(2, 4), "prompt"),
        (pictured, BeamSearchParams(2, 4), "images"),
        ([5], BeamSearchParams(10, 4, stop_token_ids=tuple(range(30))), "stop_token_ids"),
    ):
        with pytest.raises(ChangeSomething) as caught:
            llm.beam_search([PROMPTS[0], prompt], params)
        assert caught.value.field == field
    assert llm.engine.core.stats().step == before


PROMPT = np.random.default_rng(3).integers(3, 509, 40).astype("<i4")
"""Two pages of 16 tokens and a half."""
CHOICES, OUTPUT_TOKENS = 4, 8
SAMPLING = SamplingParams(seed=7, max_tokens=OUTPUT_TOKENS, ignore_eos=True, n=CHOICES)


def engine_of(architecture: str) -> Engine:
    return small_engine(architecture, 4096, 256)[0]


def answers(
    engine: Engine, choices: dict[int, SamplingParams]
) -> tuple[dict[int, list[int]], list[int], int]:
    """Tokens of each choice, their cached tokens, and the most full-attention pages in use."""
    for index, sampling in choices.items():
        spec = RequestSpec(RequestId(str(index)), PROMPT.tobytes(), sampling)
        assert is_accepted(engine.handle(Submit(spec)))
    tokens: dict[int, list[int]] = {index: [] for index in choices}
    cached, most = [], 0
    groups = engine.core.memory.layout.groups
    full = next(i for i, group in enumerate(groups) if group.kind is GroupKind.FULL)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens[int(event.request_id)] += event.token_ids
            if isinstance(event, Finished):
                cached.append(event.cached_tokens)
        used = engine.core.memory.snapshot().refs[full].values()
        most = max(most, sum(count > 0 for count in used))
    return tokens, sorted(cached), most


def test_choices_draw_with_seeds_that_count_up() -> None:
    several = SAMPLING.choices()
    assert [one.seed for one in several] == [7, 8, 9, 10]
    assert {one.n for one in several} == {1}
    assert SamplingParams(n=2).choices() == (SamplingParams(), SamplingParams())
    assert SamplingParams(seed=3).choices() == (SamplingParams(seed=3),)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_choices_share_the_prompt_and_answer_as_they_would_alone(architecture: str) -> None:
    asked = dict(enumerate(SAMPLING.choices()))
    together, cached, most = answers(engine_of(architecture), asked)
    for index, sampling in asked.items():
        alone, _, _ = answers(engine_of(architecture), {index: sampling})
        assert together[index] == alone[index]
    assert len({tuple(tokens) for tokens in together.values()}) == CHOICES
    assert cached == [0, 32, 32, 32]
    assert most == 2 + CHOICES, "two pages together, and each a third of its own"
