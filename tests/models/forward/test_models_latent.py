"""Latent attention (DeepSeek and its kin): what pages hold, and the algebra around it."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.config.description import describe
from kvell.models.forward.latents import Latents, latents_of, place_latents
from kvell.models.paged_model import PagedModel
from tests.models.attention_variants import LATENT, LATENTS
from tests.models.cases import families
from tests.models.harness import (
    PAGE_TOKENS,
    oracle_logits,
    paged,
    prompt_ids,
    runner_over,
    tiny_module,
)

RANK, ROTARY = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
NAME = "DeepseekV3ForCausalLM"

every_family = pytest.mark.parametrize("architecture", families(LATENTS))


@every_family
def test_a_token_stores_its_latent_and_nothing_of_its_heads(architecture: str) -> None:
    layers = describe(tiny_module(architecture).config, 4).layers
    assert {layer.token_bytes for layer in layers} == {(RANK + ROTARY) * 4}
    assert {(layer.kv_heads, layer.tensors) for layer in layers} == {(1, 1)}


@every_family
def test_pages_hold_what_transformers_itself_would_cache(architecture: str) -> None:
    module, ids = tiny_module(architecture), prompt_ids(11)
    with torch.inference_mode():
        cache = module(torch.tensor([ids]), use_cache=True).past_key_values
    runner = runner_over(paged(module))
    runner.step([("a", ids[:6])])
    runner.step([("a", ids[6:])])
    pages = [runner.page_bytes(0, page) for page in runner.requests["a"].pages[0]]
    layer_bytes = PAGE_TOKENS * (RANK + ROTARY) * 4
    for layer in range(3):
        place = slice(layer * layer_bytes, (layer + 1) * layer_bytes)
        rows = torch.cat([p[place].view(torch.float32).view(PAGE_TOKENS, -1) for p in pages])[:11]
        stored = torch.cat((cache.layers[layer].keys, cache.layers[layer].values), -1)[0, 0]
        torch.testing.assert_close(rows, stored, atol=1e-5, rtol=1e-4)


def expanding_module(heads: int = 3) -> Any:
    """What :class:`Latents` reads of a module, its matrix drawn at random."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(heads * (5 + 7), 6, generator=generator)
    return SimpleNamespace(
        kv_lora_rank=6,
        qk_nope_head_dim=5,
        v_head_dim=7,
        num_heads=heads,
        kv_b_proj=SimpleNamespace(weight=weight),
    )


def test_scores_of_latents_are_those_of_expanded_keys() -> None:
    module = expanding_module()
    latents, query = Latents(module), torch.randn(4, 3, 5 + 2)
    latent, rotary = torch.randn(9, 6), torch.randn(9, 2)
    expanded = (latent @ module.kv_b_proj.weight.T).view(9, 3, 12)
    keys = torch.cat((expanded[..., :5], rotary[:, None].expand(-1, 3, -1)), -1)
    expected = torch.einsum("thd,shd->ths", query, keys)
    joined, value = latents.hand_on(latent[None, None], rotary[None, None])
    actual = torch.einsum("thd,sd->ths", latents.absorb(query), joined[0, 0])
    torch.testing.assert_close(actual, expected)
    assert value[0, 0] is not None
    weights = expected.softmax(-1)
    wanted = torch.einsum("ths,shv->thv", weights, expanded[..., 5:])
    torch.testing.assert_close(latents.expand(weights @ latent), wanted)


def test_other_models_of_the_class_go_on_expanding() -> None:
    module, ids = tiny_module(NAME), prompt_ids(9)
    before = oracle_logits(module, ids)
    model = paged(module)
    assert latents_of(module.model.layers[0].self_attn) is None
    assert latents_of(model.module.model.layers[0].self_attn) is not None
    assert torch.equal(oracle_logits(module, ids), before)


def test_expanding_weights_that_change_are_seen() -> None:
    """Nothing is copied when latents are placed: loading or moving weights stays possible."""
    model, ids = paged(tiny_module(NAME)), prompt_ids(9)
    before = runner_over(model).step([("a", ids)])
    with torch.no_grad():
        model.module.model.layers[1].self_attn.kv_b_proj.weight.mul_(1.5)
    assert (runner_over(model).step([("a", ids)]) - before).abs().max() > 1e-2


def test_layers_that_store_latents_must_hand_them_on() -> None:
    description = describe(tiny_module(NAME).config, 4)
    with pytest.raises(ChangeSomething, match=r"latents in layers \[0, 1, 2\]"):
        place_latents(tiny_module("LlamaForCausalLM"), description)


def test_modules_that_hand_latents_on_must_be_described_so() -> None:
    module = copy.deepcopy(tiny_module(NAME))
    description = describe(module.config, 4)
    heads = tuple(replace(layer, tensors=2) for layer in description.layers)
    with pytest.raises(ChangeSomething, match="latents in layers"):
        place_latents(module, replace(description, layers=heads))


@pytest.mark.parametrize("native", [False, True], ids=["portable", "native"])
def test_bfloat16_errs_no_more_than_transformers(native: bool) -> None:
    half = copy.deepcopy(tiny_module(NAME)).bfloat16()
    half.set_attn_implementation("eager")
    ids = prompt_ids(60)
    exact = oracle_logits(copy.deepcopy(half).float(), ids)
    kernels = choose_kernels(torch.device("cpu")) if native else PortableKernels()
    model = PagedModel(copy.deepcopy(half), describe(half.config, 2), kernels)
    ours = (runner_over(model).step([("a", ids)]) - exact).square().mean().sqrt()
    theirs = (oracle_logits(half, ids) - exact).square().mean().sqrt()
    assert 0 < ours <= 1.25 * theirs
