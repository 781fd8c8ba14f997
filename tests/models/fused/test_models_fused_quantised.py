"""The fused pass over int8 and int4 weights, on every instruction set of this processor."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kvell.models.fused.grouped import Form, GroupedWeight, quantise
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from tests.models.cases import covering, families
from tests.models.fused_models import MARKED_SETS, fused_model
from tests.models.harness import (
    assert_exact,
    oracle_logits,
    prompt_ids,
    runner_over,
    tiny_config,
    tiny_module,
)

FAMILIES = ("FalconH1ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
MARKED = families(FAMILIES)
FORMS = ("int8", "int4")
DTYPES = (torch.float32, torch.bfloat16)
every_form = pytest.mark.parametrize("quantization", FORMS)


def unpacked_module(module: Any, quantization: str) -> Any:
    """The oracle: the same module, its linears holding the numbers that were packed."""
    mine = copy.deepcopy(module).float()
    for name, linear in mine.named_modules():
        if isinstance(linear, nn.Linear):
            fours = quantization == "int4" and name != "lm_head"
            made = quantise(linear.weight, Form.INT4 if fours else Form.INT8)
            linear.weight.data = made.unpack()
    return mine


def steps_of(model: PagedModel, ids: list[int], ends: list[int]) -> torch.Tensor:
    runner = runner_over(model)
    starts = [0, *ends[:-1]]
    return torch.cat([runner.step([("a", ids[s:e])]) for s, e in zip(starts, ends, strict=True)])


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@covering({"architecture": MARKED, "quantization": FORMS, "instruction_set": MARKED_SETS})
def test_chunks_and_decodes_are_exact(
    architecture: str, quantization: str, instruction_set: str
) -> None:
    module, ids = tiny_module(architecture), prompt_ids(30)
    model = fused_model(module, instruction_set, quantization=quantization)
    logits = steps_of(model, ids, [1, 14, 15, 16, 29, 30])
    assert_exact(logits, oracle_logits(unpacked_module(module, quantization), ids))


@covering({"architecture": MARKED, "quantization": FORMS, "instruction_set": MARKED_SETS})
def test_bf16_errs_no_more_than_transformers(
    architecture: str, quantization: str, instruction_set: str
) -> None:
    """Against float32 with the same unpacked weights; theirs rounds them to bfloat16."""
    module = copy.deepcopy(tiny_module(architecture)).bfloat16()
    oracle = unpacked_module(module, quantization)
    prompts = [prompt_ids(40, seed) for seed in range(3)]
    exact = torch.cat([oracle_logits(oracle, ids) for ids in prompts])
    rounded = copy.deepcopy(oracle).bfloat16()
    theirs = torch.cat([oracle_logits(rounded, ids) for ids in prompts])
    model = fused_model(module, instruction_set, quantization=quantization)
    ours = torch.cat([steps_of(model, ids, [9, 10, 20, 40]) for ids in prompts])
    assert 0 < rms(ours - exact) <= 1.25 * rms(theirs - exact)


@covering({"quantization": FORMS, "instruction_set": MARKED_SETS, "dtype": DTYPES})
def test_nothing_around_a_token_changes_a_bit(
    quantization: str, instruction_set: str, dtype: torch.dtype
) -> None:
    """Neither chunks, nor other requests: 1, 12, 13 and more rows."""
    module = copy.deepcopy(tiny_module("LlamaForCausalLM")).to(dtype)
    model = fused_model(module, instruction_set, quantization=quantization)
    ids, other = prompt_ids(29), prompt_ids(19, seed=1)
    whole = steps_of(model, ids, [29])
    assert torch.equal(steps_of(model, ids, [1, 13, 26, 27, 29]), whole)
    runner = runner_over(model, shuffle_seed=5)
    beside = [runner.step([("b", other[:9]), ("a", ids[:13]), ("c", other)])[9:22]]
    beside += [runner.step([("a", [token]), ("b", [5])])[:1] for token in ids[13:]]
    assert torch.equal(torch.cat(beside), whole)
    assert len(set(whole.argmax(-1).tolist())) > 5


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


ODD_SHAPES: list[dict[str, Any]] = [
    {"attention_bias": True, "mlp_bias": True},
    {"intermediate_size": 52, "vocab_size": 515},
    {"hidden_size": 40, "head_dim": 24, "intermediate_size": 70},
    {"hidden_size": 192, "head_dim": 64, "intermediate_size": 352},
    {"tie_word_embeddings": True},
]


@covering(
    {"changes": ODD_SHAPES, "quantization": FORMS, "instruction_set": MARKED_SETS}, together=1
)
def test_odd_shapes(changes: dict[str, Any], quantization: str, instruction_set: str) -> None:
    """Rows that are no whole groups; a tied table is read out of the packed head."""
    module = random_module(tiny_config("LlamaForCausalLM", **changes), 5, torch.float32, 8.0)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    oracle = unpacked_module(module, quantization)
    if changes.get("tie_word_embeddings"):
        module.lm_head.weight = module.model.embed_tokens.weight
        oracle = unpacked_module(module, quantization)
        oracle.model.embed_tokens.weight.data = oracle.lm_head.weight.data
    ids = prompt_ids(21)
    logits = steps_of(
        fused_model(module, instruction_set, quantization=quantization), ids, [13, 21]
    )
    assert_exact(logits, oracle_logits(oracle, ids))


@every_form
def test_threads_change_nothing(quantization: str) -> None:
    module = random_module(
        tiny_config("Gemma3ForCausalLM", hidden_size=192), 3, torch.bfloat16, 8.0
    )
    ids = prompt_ids(40)
    alone, together = (
        steps_of(fused_model(module, num_threads=threads, quantization=quantization), ids, [30, 40])
        for threads in (1, 3)
    )
    assert torch.equal(together, alone)


def test_weights_take_fewer_bytes() -> None:
    module = random_module(tiny_config("LlamaForCausalLM", hidden_size=128), 3, torch.bfloat16, 8.0)
    packed = {
        name: model.fused.weight_bytes
        for name in ("none", "int8", "int4")
        if (model := fused_model(module, quantization=name)).fused
    }
    assert packed["int8"] == packed["none"] * 34 / 64
    assert packed["int4"] < packed["int8"]


def test_blocks_that_a_model_brings_are_kept_where_rows_lie_together() -> None:
    """Queries, keys and values are one matrix: blocks of two forms among them are not kept."""
    module, ids = tiny_module("LlamaForCausalLM"), prompt_ids(12)
    names = ("q_proj", "k_proj", "v_proj")
    blocks: dict[str, GroupedWeight] = {}
    oracle = unpacked_module(module, "int4")
    for index, layer in enumerate(module.model.layers):
        for name in names:
            form = Form.INT4 if index == 1 and name == "v_proj" else Form.INT8
            made = quantise(getattr(layer.self_attn, name).weight, form)
            blocks[f"model.layers.{index}.self_attn.{name}.weight"] = made
            if index != 1:
                linear = getattr(oracle.model.layers[index].self_attn, name)
                linear.weight.data = made.unpack()
    model = fused_model(module, quantization="int4", blocks=blocks)
    assert_exact(steps_of(model, ids, [12]), oracle_logits(oracle, ids))
