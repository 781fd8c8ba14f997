"""Rotations that depend on a text's length: each text has its own, whatever is beside it."""

import copy
from functools import cache
from typing import Any

import pytest
import torch

from kvell.models.forward.true_positions import RopeTables
from kvell.models.loading.random_weights import random_module
from tests.engine.speculating import GREEDY, served
from tests.models.harness import prompt_ids, tiny_config

SHORT = 40
"""Longer texts have the long table."""

SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "MiniCPM3ForCausalLM": ({}, 4),
    "Phi3ForCausalLM": ({"hidden_size": 64, "original_max_position_embeddings": SHORT}, 8),
}
"""Changes to the tiny config of each family, and its rotated pairs."""


@cache
def longrope_module(architecture: str) -> Any:
    """A model whose long table turns keys by another angle altogether."""
    sizes, rotated = SIZES[architecture]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * rotated,
        "long_factor": [1.0 + 3 * index for index in range(rotated)],
        "original_max_position_embeddings": SHORT,
    }
    config = tiny_config(architecture, rope_parameters=rope, vocab_size=97, **sizes)
    return random_module(config, seed=3, scale=8.0)


def reference(module: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers, which computes the whole text again for each."""
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = copy.deepcopy(module)(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", SIZES)
def test_short_texts_beside_long_ones_and_those_that_become_long(architecture: str) -> None:
    module = longrope_module(architecture)
    long = prompt_ids(60, vocab=97)
    prompts = {"long": long, "short": long[:15], "grows": long[:30], "exact": long[:SHORT]}
    run = served(module, batched=23)
    run.ask(prompts, GREEDY)
    run.ask({"again": long[:16]}, GREEDY)
    for name, prompt in (prompts | {"again": long[:16]}).items():
        assert run.outputs[name] == reference(module, prompt, 20), name
    again = run.ended["again"]
    assert again.cached_tokens <= 15, "no key of the long table is a hit"


def test_dynamic_scaling_keeps_its_first_frequencies() -> None:
    """Its texts are no longer than the model was made for; steps that warm it may be."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    module = random_module(tiny_config("LlamaForCausalLM", rope_parameters=rope), seed=3)
    RopeTables(module)
    rotary, hidden = module.model.rotary_emb, torch.zeros(1, 1, 48)
    first = rotary(hidden, torch.tensor([[7]]))
    rotary(hidden, torch.tensor([[999]]))
    assert torch.equal(rotary(hidden, torch.tensor([[7]]))[0], first[0])
