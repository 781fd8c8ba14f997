"""Answers to one prompt share the pages that it fills; each computes the rest of it again."""

import numpy as np
import pytest

from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import GroupKind
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import RequestId
from tests.llm.exactness import small_engine

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
