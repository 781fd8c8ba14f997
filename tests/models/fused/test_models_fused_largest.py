"""Where logits are largest, found by the compiled pass beside the logits themselves."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.vocabulary import NOT_NUMBERS
from tests.models.cases import covering
from tests.models.fused_models import MARKED_SETS, fused_model, generic_model
from tests.models.harness import prompt_ids, runner_over, tiny_config, tiny_module

DTYPES = (torch.float32, torch.bfloat16)
VOCAB = 5_003
"""More than are searched at once, and no whole number of vectors."""


def asked(model: PagedModel, ids: list[int]) -> tuple[torch.Tensor, list[int] | None]:
    """Logits of a request's tokens, and where the pass says that they are largest."""
    forward, batches = model.forward, list[ForwardBatch]()

    def asking(batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
        batches.append(replace(batch, wants_largest=True))
        return forward(batches[-1], callbacks)

    model.forward = asking  # type: ignore[assignment, method-assign]
    logits = runner_over(model).step([("a", ids)])
    return logits, model.largest(batches[-1])


@covering({"instruction_set": MARKED_SETS, "num_threads": [1, 3], "dtype": DTYPES})
def test_it_is_where_the_logits_say(
    instruction_set: str, num_threads: int, dtype: torch.dtype
) -> None:
    config = tiny_config("LlamaForCausalLM", vocab_size=VOCAB)
    model = fused_model(random_module(config, 3, dtype, 8.0), instruction_set, None, num_threads)
    logits, largest = asked(model, prompt_ids(23))
    assert largest == logits.argmax(-1).tolist()
    assert len(set(largest)) > 10


@pytest.mark.parametrize("places", [[0], [4_097, 17], [5_002, 2_048, 3_000], [31, 15, 4_500]])
def test_of_equals_it_is_the_first(places: list[int]) -> None:
    module = random_module(tiny_config("LlamaForCausalLM", vocab_size=VOCAB), 3, scale=8.0)
    model = fused_model(module)
    best = asked(model, prompt_ids(1))[0].argmax().item()
    other = copy.deepcopy(module)
    with torch.no_grad():
        row = other.lm_head.weight[int(best)].clone()
        other.lm_head.weight[int(best)] = -row
        for place in places:
            other.lm_head.weight[place] = row
    assert asked(fused_model(other), prompt_ids(1))[1] == [min(places)]


def test_where_all_are_equal_it_is_the_first_of_all() -> None:
    module = copy.deepcopy(tiny_module("LlamaForCausalLM"))
    with torch.no_grad():
        module.lm_head.weight.zero_()
    assert asked(fused_model(module), prompt_ids(3))[1] == [0, 0, 0]


def test_nobody_found_it_for_a_batch_that_was_not_computed_or_did_not_want_it() -> None:
    model, seen = fused_model(tiny_module("LlamaForCausalLM")), list[ForwardBatch]()
    forward = model.forward

    def noting(batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
        seen.append(batch)
        return forward(batch, callbacks)

    model.forward = noting  # type: ignore[assignment, method-assign]
    runner_over(model).step([("a", prompt_ids(4))])
    assert model.largest(seen[0]) is None
    _, largest = asked(model, prompt_ids(4))
    assert largest is not None
    assert model.largest(replace(seen[0], wants_largest=True)) is None
    assert asked(generic_model(tiny_module("LlamaForCausalLM")), prompt_ids(4))[1] is None


@covering(
    {
        "instruction_set": MARKED_SETS,
        "place": [0, 17, 4_999, 5_002],
        "number": [float("nan"), float("inf")],
    }
)
def test_where_a_logit_is_no_number_nothing_is(
    instruction_set: str, place: int, number: float
) -> None:
    module = copy.deepcopy(random_module(tiny_config("LlamaForCausalLM", vocab_size=VOCAB), 3))
    with torch.no_grad():
        module.lm_head.weight[place] = number  # of infinities the products are NaN or infinite
    _, largest = asked(fused_model(module, instruction_set, None, 1), prompt_ids(3))
    assert largest is not None and set(largest) <= {NOT_NUMBERS, *range(VOCAB)}
    assert NOT_NUMBERS in largest
