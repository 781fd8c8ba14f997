"""Where logits are largest, found by the compiled pass beside the logits themselves."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.models.random_weights import random_module
from tests.models.harness import prompt_ids, runner_over, tiny_config, tiny_module
from tests.models.lean_models import every_set, generic_model, lean_model

VOCAB = 5_003
"""More than are searched at once, and no whole number of vectors."""


def asked(model: PagedModel, ids: list[int]) -> torch.Tensor:
    """Logits of a request's tokens, the pass being asked where they are largest."""
    forward = model.forward

    def asking(batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
        return forward(replace(batch, wants_largest=True), callbacks)

    model.forward = asking  # type: ignore[method-assign]
    return runner_over(model).step([("a", ids)])


@every_set
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_where_the_logits_say(
    instruction_set: str, num_threads: int, dtype: torch.dtype
) -> None:
    config = tiny_config("LlamaForCausalLM", vocab_size=VOCAB)
    model = lean_model(random_module(config, 3, dtype, 8.0), instruction_set, None, num_threads)
    logits = asked(model, prompt_ids(23))
    assert model.largest == logits.argmax(-1).tolist()
    assert len(set(model.largest)) > 10


@pytest.mark.parametrize("places", [[0], [4_097, 17], [5_002, 2_048, 3_000], [31, 15, 4_500]])
def test_of_equals_it_is_the_first(places: list[int]) -> None:
    module = random_module(tiny_config("LlamaForCausalLM", vocab_size=VOCAB), 3, scale=8.0)
    model = lean_model(module)
    best = asked(model, prompt_ids(1)).argmax().item()
    other = copy.deepcopy(module)
    with torch.no_grad():
        row = other.lm_head.weight[int(best)].clone()
        other.lm_head.weight[int(best)] = -row
        for place in places:
            other.lm_head.weight[place] = row
    again = lean_model(other)
    asked(again, prompt_ids(1))
    assert again.largest == [min(places)]


def test_where_all_are_equal_it_is_the_first_of_all() -> None:
    module = copy.deepcopy(tiny_module("LlamaForCausalLM"))
    with torch.no_grad():
        module.lm_head.weight.zero_()
    model = lean_model(module)
    asked(model, prompt_ids(3))
    assert model.largest == [0, 0, 0]


def test_nobody_asked_and_nobody_found() -> None:
    model = lean_model(tiny_module("LlamaForCausalLM"))
    runner_over(model).step([("a", prompt_ids(4))])
    assert model.largest is None
    generic = generic_model(tiny_module("LlamaForCausalLM"))
    asked(generic, prompt_ids(4))
    assert generic.largest is None
