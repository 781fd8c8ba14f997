"""Penalties and biases: each by its own plain words, and repetition as transformers has it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import ReasoningBudget
from kvell.engine.sampling.controls import adjust

WORDS = 24
END = 3

values = st.floats(-40, 40, width=32)
rows = st.lists(values, min_size=WORDS, max_size=WORDS)
words = st.integers(0, WORDS - 1)
texts = st.lists(words, max_size=12)
penalties = st.floats(-2, 2)
biases = st.dictionaries(words, st.floats(-100, 100), max_size=5)


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ends: Sequence[int] = (END,),
) -> torch.Tensor:
    row = torch.tensor(logits, dtype=torch.float32)
    past = np.array([*prompt, *output], np.int32)
    adjust(row, params, past, len(prompt), ends)
    return row


@given(rows, texts, texts, penalties, penalties, st.integers(0, 30))
def test_penalties_look_at_the_last_tokens_only(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    window: int,
) -> None:
    """As if the tokens before were not there; a window of 0 has no penalty."""
    given_penalties: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
    }
    looking_back = SamplingParams(**given_penalties, repeat_last_n=window)
    first = max(0, len(prompt) + len(output) - window)
    seen = prompt[first:], output[max(0, first - len(prompt)) :]
    expected = adjusted(logits, SamplingParams(**given_penalties), *seen)
    assert torch.equal(adjusted(logits, looking_back, prompt, output), expected)
    if not window:
        assert expected.tolist() == torch.tensor(logits, dtype=torch.float32).tolist()


@given(
    rows,
    st.integers(0, 8),
    st.lists(st.integers(5, WORDS - 1), max_size=12),
    st.booleans(),
    st.floats(-100, 100),
)
def test_a_budget_of_reasoning_ends_it_behind_so_many_tokens(
    logits: list[float], tokens: int, thoughts: list[int], is_open: bool, bias: float
) -> None:
    """Drawn token by token, with the end wherever the model would write it."""
    start, end = 1, 2
    budget = ReasoningBudget(tokens, end, None if is_open else start)
    params = SamplingParams(reasoning_budget=budget, logit_bias={end: bias}, max_tokens=99)
    output = [] if is_open else [start]
    plain = SamplingParams(logit_bias={end: bias})
    for place, thought in enumerate([*thoughts, 7, 7]):
        found = adjusted(logits, params, [9, end], output)
        if place == tokens:
            assert found.isfinite().nonzero().flatten().tolist() == [end]
            output.append(end)
        else:
            assert torch.equal(found, adjusted(logits, plain, [9, end], output))
            output.append(thought)
    assert output.count(end) <= 1


@pytest.mark.parametrize(
    "output",
    [[2, 7, 7], [7, 7, 2], [1, 7, 2, 7], [7, 7, 7, 7], [1, 7, 7, 7, 7], [], [1], [7]],
)
def test_reasoning_that_ended_or_never_began_is_not_bound(output: list[int]) -> None:
    logits = [0.5] * WORDS
    params = SamplingParams(reasoning_budget=ReasoningBudget(3, 2, 1))
    assert torch.equal(adjusted(logits, params, [9], output), torch.tensor(logits))


def single(value: float) -> np.float32:
    return np.float32(value)


@given(rows, texts, texts, st.floats(0.01, 100))
def test_repetition_is_transformers_bit_for_bit(
    logits: list[float], prompt: list[int], output: list[int], penalty: float
) -> None:
    row = torch.tensor([logits], dtype=torch.float32)
    ids = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, row.clone())[0]
    found = adjusted(logits, SamplingParams(repetition_penalty=penalty), prompt, output)
    assert found.numpy().tobytes() == expected.numpy().tobytes()


def naive(
    logits: Sequence[float], output: Sequence[int], presence: float, frequency: float
) -> list[np.float32]:
    expected = []
    for token, logit in enumerate(logits):
        count = output.count(token)
        penalty = presence + frequency * count if count else 0.0
        expected.append(single(logit) - single(penalty))
    return expected


@given(rows, texts, texts, penalties, penalties)
def test_presence_and_frequency_count_the_output_only(
    logits: list[float], prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = adjusted(logits, params, prompt, output)
    assert found.tolist() == naive(logits, output, presence, frequency)


@given(rows, texts, texts, biases)
def test_a_bias_is_added_to_its_token_and_no_other(
    logits: list[float], prompt: list[int], output: list[int], bias: Mapping[int, float]
) -> None:
    found = adjusted(logits, SamplingParams(logit_bias=bias), prompt, output)
    expected = [single(logit) + single(bias.get(i, 0.0)) for i, logit in enumerate(logits)]
    assert found.tolist() == expected


@given(
    rows,
    st.integers(0, 6),
    st.integers(0, 8),
    st.lists(words, max_size=3),
    st.lists(words, max_size=3),
)
def test_no_end_and_no_stop_token_before_min_tokens(
    logits: list[float], least: int, made: int, ends: list[int], stops: list[int]
) -> None:
    params = SamplingParams(min_tokens=least, stop_token_ids=tuple(stops))
    found = adjusted(logits, params, [5, 6], [7] * made, ends).tolist()
    hidden = {*ends, *stops} if made < least else set()
    for token, logit in enumerate(logits):
        assert found[token] == (-np.inf if token in hidden else single(logit))


@pytest.mark.parametrize("unknown", [-1, WORDS, 1 << 40, (1 << 64) - 1])
def test_a_stop_token_outside_the_vocabulary_hides_nothing_else(unknown: int) -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(unknown, 7))
    found = adjusted([1.0] * WORDS, params)
    assert torch.isneginf(found).nonzero().flatten().tolist() == [END, 7]


@given(rows, texts, texts, st.lists(st.tuples(st.integers(0, 12), st.integers(-9, -1))))
def test_images_count_for_nothing(
    logits: list[float], prompt: list[int], output: list[int], images: list[tuple[int, int]]
) -> None:
    params = SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25)
    with_images = list(prompt)
    for place, image in images:
        with_images.insert(place, image)
    plain = adjusted(logits, params, prompt, output)
    assert torch.equal(adjusted(logits, params, with_images, output), plain)


def test_what_repeats_is_divided_or_multiplied_once_however_often() -> None:
    found = adjusted([4.0, -4.0, 4.0, 0.0], SamplingParams(repetition_penalty=2.0), [0, 1, 0], [0])
    assert found.tolist() == [2.0, -8.0, 4.0, 0.0]


@given(rows, texts, texts, st.floats(0.5, 2), penalties, penalties, biases)
def test_penalties_come_before_biases_and_the_hiding_of_ends_last(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: Mapping[int, float],
) -> None:
    several = SamplingParams(
        max_tokens=None,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={**bias, END: 100.0},
        min_tokens=len(output) + 1,
    )
    row = adjusted(logits, SamplingParams(repetition_penalty=repetition), prompt, output).tolist()
    row = [float(value) for value in naive(row, output, presence, frequency)]
    row = adjusted(row, SamplingParams(logit_bias=several.logit_bias), prompt, output).tolist()
    row[END] = -np.inf
    assert adjusted(logits, several, prompt, output).tolist() == row


def test_the_order_of_penalty_and_bias_can_be_told() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 3.0})
    assert adjusted([0.0, 4.0], params, [1], ends=()).tolist() == [0.0, 5.0]  # not (4 + 3) / 2


def test_logits_without_a_wish_stay_as_they_are() -> None:
    logits = [0.5 * word for word in range(WORDS)]
    assert adjusted(logits, SamplingParams(), [1, 2], [3]).tolist() == logits
