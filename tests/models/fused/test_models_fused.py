"""The fused forward pass against transformers' own, packed weights too; and its largest logits."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from kvell.models.families.families import EXACT, FUSED
from kvell.models.fused.grouped import BlockWeight, Form, GroupedWeight, quantise
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.vocabulary import NOT_NUMBERS
from tests.models.cases import MECHANISMS, covering, families, long_unless
from tests.models.fused_models import (
    MARKED_SETS,
    SETS,
    bf16_module,
    every_set,
    fused_model,
    generic_model,
)
from tests.models.harness import (
    assert_exact,
    oracle_logits,
    prompt_ids,
    runner_over,
    tiny_config,
    tiny_module,
)

DTYPES = (torch.float32, torch.bfloat16)
FAMILIES = families(FUSED)
every_family = pytest.mark.parametrize("architecture", FAMILIES)
FORMS = ("int8", "int4")
PACKED = ("FalconH1ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
CASES = [(name, "none") for name in sorted(FUSED)]
CASES += [(name, form) for name in PACKED for form in FORMS]
FORMED = [pytest.param(*case, marks=long_unless(case[0] in MECHANISMS.values())) for case in CASES]
"""Families with weights as they are, and some with packed ones."""


def unpacked_module(module: Any, quantization: str) -> Any:
    """The oracle: the same module, its linears holding the numbers that were packed."""
    mine = copy.deepcopy(module).float()
    for name, linear in mine.named_modules():
        if isinstance(linear, nn.Linear) and quantization != "none":
            fours = quantization == "int4" and name != "lm_head"
            made = quantise(linear.weight, Form.INT4 if fours else Form.INT8)
            linear.weight.data = made.unpack()
    return mine


def steps_of(model: PagedModel, ids: list[int], ends: list[int], seed: int = 0) -> torch.Tensor:
    runner = runner_over(model, shuffle_seed=seed)
    starts = [0, *ends[:-1]]
    return torch.cat([runner.step([("a", ids[s:e])]) for s, e in zip(starts, ends, strict=True)])


def test_every_fused_family_is_an_exact_one() -> None:
    assert set(FUSED) <= EXACT


@covering({"architecture,quantization": FORMED, "instruction_set": MARKED_SETS})
def test_chunks_and_decodes_are_exact(
    architecture: str, quantization: str, instruction_set: str
) -> None:
    module, ids = tiny_module(architecture), prompt_ids(30)
    model = fused_model(module, instruction_set, quantization=quantization)
    logits = steps_of(model, ids, [1, 14, 15, 16, 29, 30])
    assert_exact(logits, oracle_logits(unpacked_module(module, quantization), ids))


@every_family
def test_ragged_batch(architecture: str) -> None:
    module = tiny_module(architecture)
    prompts = {name: prompt_ids(length) for name, length in (("a", 23), ("b", 1), ("c", 12))}
    logits = runner_over(fused_model(module)).step(list(prompts.items()))
    parts = torch.split(logits, [len(ids) for ids in prompts.values()])
    for part, ids in zip(parts, prompts.values(), strict=True):
        assert_exact(part, oracle_logits(module, ids))


@covering({"architecture,quantization": FORMED, "instruction_set": MARKED_SETS, "dtype": DTYPES})
def test_nothing_around_a_token_changes_a_bit(
    architecture: str, quantization: str, instruction_set: str, dtype: torch.dtype
) -> None:
    """Neither chunks, nor other requests, nor where pages lie (states, if any, in float32)."""
    module = copy.deepcopy(tiny_module(architecture)).to(dtype)
    module.config.mamba_ssm_cache_dtype = "float32"
    model = fused_model(module, instruction_set, quantization=quantization)
    ids, other = prompt_ids(29), prompt_ids(19, seed=1)
    whole = steps_of(model, ids, [29])
    assert torch.equal(steps_of(model, ids, [1, 13, 26, 27, 29], seed=3), whole)
    runner = runner_over(model, shuffle_seed=5)
    beside = [runner.step([("b", other[:9]), ("a", ids[:13]), ("c", other)])[9:22]]
    beside += [runner.step([("a", [token]), ("b", [5])])[:1] for token in ids[13:]]
    assert torch.equal(torch.cat(beside), whole)
    assert len(set(whole.argmax(-1).tolist())) > 5


@every_set
def test_wide_products_of_many_rows_are_those_of_one(instruction_set: str) -> None:
    config = tiny_config("Gemma3ForCausalLM", hidden_size=384, intermediate_size=1000)
    model = fused_model(random_module(config, 3, torch.bfloat16, 8.0), instruction_set)
    ids = prompt_ids(150)
    assert torch.equal(steps_of(model, ids, [3, 60, 149, 150]), steps_of(model, ids, [150]))


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", torch.float32), *((form, torch.bfloat16) for form in ("none", *FORMS))],
)
def test_threads_change_nothing(quantization: str, dtype: torch.dtype) -> None:
    module = random_module(tiny_config("Gemma3ForCausalLM", hidden_size=192), 3, dtype, 8.0)
    ids = prompt_ids(40)
    alone, *together = (
        steps_of(
            fused_model(module, num_threads=threads, quantization=quantization), ids, [30, 31, 40]
        )
        for threads in (1, 2, 3)
    )
    assert all(torch.equal(one, alone) for one in together)


@covering({"architecture,quantization": FORMED, "instruction_set": MARKED_SETS})
def test_bf16_errs_no_more_than_transformers(
    architecture: str, quantization: str, instruction_set: str
) -> None:
    """Root mean square of the difference from float32 with the same rounded weights."""
    module = bf16_module(architecture)
    oracle = unpacked_module(module, quantization)
    rounded = copy.deepcopy(oracle).bfloat16()
    prompts = [prompt_ids(40, seed) for seed in range(3)]
    exact, theirs = (
        torch.cat([oracle_logits(one, ids) for ids in prompts]) for one in (oracle, rounded)
    )
    model = fused_model(module, instruction_set, quantization=quantization)
    ours = torch.cat([steps_of(model, ids, [9, 10, 20, 40]) for ids in prompts])
    assert 0 < rms(ours - exact) <= 1.25 * rms(theirs - exact)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


ODD_SHAPES: list[dict[str, Any]] = [
    {"attention_bias": True, "mlp_bias": True},
    {"intermediate_size": 52, "vocab_size": 515},
    {"hidden_size": 40, "head_dim": 24, "intermediate_size": 70},
    {"num_key_value_heads": 1, "head_dim": 64},
    {"hidden_size": 192, "head_dim": 64, "intermediate_size": 352},
    {"tie_word_embeddings": True},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
]


@covering(
    {
        "changes": ODD_SHAPES,
        "quantization": ("none", *FORMS),
        "instruction_set": MARKED_SETS,
    }
)
def test_odd_shapes(changes: dict[str, Any], quantization: str, instruction_set: str) -> None:
    """Rows that are no whole groups; a tied table is read out of the packed head."""
    module = random_module(tiny_config("LlamaForCausalLM", **changes), 5, torch.float32, 8.0)
    if changes.get("tie_word_embeddings"):
        module.lm_head.weight = module.model.embed_tokens.weight
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    oracle = unpacked_module(module, quantization)
    if changes.get("tie_word_embeddings"):
        oracle.model.embed_tokens.weight.data = oracle.lm_head.weight.data
    ids = prompt_ids(21)
    model = fused_model(module, instruction_set, quantization=quantization)
    assert_exact(steps_of(model, ids, [13, 14, 21]), oracle_logits(oracle, ids))


@covering(
    {
        "kv_dtype": [torch.int8, torch.float8_e4m3fn, torch.bfloat16],
        "instruction_set": MARKED_SETS,
    },
    together=1,
)
def test_quantised_pages_hold_what_torch_makes_of_the_same_vectors(
    kv_dtype: torch.dtype, instruction_set: str
) -> None:
    """The first layer's: its keys and values differ from the generic pass by rounding at most."""
    module, ids = tiny_module("Qwen3ForCausalLM"), prompt_ids(23)
    runners = [
        runner_over(model(module, instruction_set, kv_dtype))
        for model in (fused_model, generic_model)
    ]
    logits = [runner.step([("a", ids)]) for runner in runners]
    scale = logits[1].abs().max()
    assert (logits[0] - logits[1]).abs().max() <= 0.02 * scale
    pools = [runner.pool for runner in runners]
    assert (pools[0] == pools[1]).float().mean() > 0.97


def test_a_model_on_all_sets_differs_by_rounding_only() -> None:
    module, ids = bf16_module("Qwen3ForCausalLM"), prompt_ids(30)
    made = [steps_of(fused_model(module, name), ids, [30]) for name in SETS]
    for other in made[1:]:
        assert (made[0] - other).abs().max() < 0.05 * made[0].abs().max()


@covering({"quantization": FORMS, "instruction_set": MARKED_SETS, "factor": [10, 40, 300]})
def test_a_large_number_costs_the_small_ones_beside_it_nothing(
    quantization: str, instruction_set: str, factor: int
) -> None:
    """Whole numbers are scaled by a group's largest; the plain set multiplies bf16 as floats."""
    module = copy.deepcopy(tiny_module("LlamaForCausalLM"))
    for layer in module.model.layers:
        layer.input_layernorm.weight.data[5] *= factor
        layer.post_attention_layernorm.weight.data[7] *= factor
    module = module.bfloat16()
    oracle = unpacked_module(module, quantization)
    prompts = [prompt_ids(40, seed) for seed in range(3)]
    exact = torch.cat([oracle_logits(oracle, ids) for ids in prompts])
    ours, plain = (
        torch.cat([steps_of(model, ids, [9, 10, 40]) for ids in prompts])
        for model in (
            fused_model(module, name, quantization=quantization)
            for name in (instruction_set, "portable")
        )
    )
    assert 0 < rms(ours - exact) <= 1.2 * rms(plain - exact)


@covering(
    {"quantization": FORMS, "instruction_set": MARKED_SETS, "bad": [float("nan"), float("inf")]}
)
def test_what_is_no_number_stays_none(quantization: str, instruction_set: str, bad: float) -> None:
    """One token's, and no other's: rows are multiplied side by side."""
    module = copy.deepcopy(tiny_module("LlamaForCausalLM")).bfloat16()
    module.model.embed_tokens.weight.data[3] = bad
    model = fused_model(module, instruction_set, quantization=quantization)
    logits = runner_over(model).step([("a", [1, 2]), ("b", [3]), ("c", [4])])
    assert logits[2].isnan().all()
    assert logits[[0, 1, 3]].isfinite().all()


def test_weights_take_fewer_bytes() -> None:
    module = random_module(tiny_config("LlamaForCausalLM", hidden_size=128), 3, torch.bfloat16, 8.0)
    packed = {
        name: model.fused.weight_bytes
        for name in ("none", "int8", "int4")
        if (model := fused_model(module, quantization=name)).fused
    }
    assert packed["int8"] == packed["none"] * 34 / 64
    assert packed["int4"] < packed["int8"]


def block_of(weight: GroupedWeight) -> BlockWeight:
    numbers = weight.unpack()
    rows = lambda start, stop: numbers[start:stop]  # noqa: E731
    return BlockWeight("drawn", weight.form, weight.shape, rows, lambda: weight)


def test_blocks_that_a_model_brings_are_kept_where_rows_lie_together() -> None:
    """Queries, keys and values are one matrix: blocks of two forms among them become int8."""
    module, ids = tiny_module("LlamaForCausalLM"), prompt_ids(12)
    names = ("q_proj", "k_proj", "v_proj")
    blocks: dict[str, BlockWeight] = {}
    oracle = unpacked_module(module, "int4")
    for index, layer in enumerate(module.model.layers):
        for name in names:
            form = Form.INT4 if index == 1 and name == "v_proj" else Form.INT8
            made = quantise(getattr(layer.self_attn, name).weight, form)
            block = block_of(made)
            blocks[f"model.layers.{index}.self_attn.{name}.weight"] = block
            linear = getattr(oracle.model.layers[index].self_attn, name)
            linear.weight.data = block.to_form(Form.INT8).unpack()
    model = fused_model(module, quantization="int4", blocks=blocks)
    assert_exact(steps_of(model, ids, [12]), oracle_logits(oracle, ids))


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
