"""Layers that read differently may share one group's pages: what each reads is its own."""

from functools import cache
from typing import Any

import numpy as np
import torch

from kvell.engine.assembly import build_engine
from kvell.engine.protocol.messages import Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.options import EngineOptions
from kvell.memory import MANAGERS, Manager
from kvell.models.loading.random_weights import random_module
from kvell.vocabulary import RequestId
from tests.models.cases import covering
from tests.models.fused_models import fused_model
from tests.models.harness import prompt_ids, tiny_config

MIB = 1 << 20
LONG_TOKENS = 1_200  # more than two of the pieces that attention cuts a context into
PROMPT, OUTPUTS = prompt_ids(LONG_TOKENS), 4
WINDOWED = ("Gemma3ForCausalLM", "MinistralForCausalLM")


@cache
def module_of(architecture: str) -> Any:
    """A tiny model with full layers beside layers with a short window, for long prompts."""
    config = tiny_config(architecture, max_position_embeddings=2 * LONG_TOKENS)
    module = random_module(config, seed=3)
    module.set_attn_implementation("eager")
    assert len(set(config.layer_types)) == 2
    return module


@cache
def oracle_tokens(architecture: str) -> list[int]:
    """What transformers says behind the prompt, greedily."""
    known = list(PROMPT)
    for _ in range(OUTPUTS):
        with torch.inference_mode():
            logits = module_of(architecture)(torch.tensor([known]), use_cache=False).logits
        known.append(int(logits[0, -1].argmax()))
    return known[len(PROMPT) :]


@covering({"architecture": WINDOWED, "manager": MANAGERS}, together=1)
def test_long_contexts_under_every_manager(architecture: str, manager: Manager) -> None:
    model = fused_model(module_of(architecture), num_threads=2)
    options = EngineOptions(
        kv_memory_bytes=64 * MIB,
        max_model_len=2 * LONG_TOKENS,
        max_num_batched_tokens=512,
        manager=manager,
    )
    engine = build_engine(model, architecture, options)
    params = SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True)
    engine.handle(Submit(RequestSpec(RequestId("a"), np.asarray(PROMPT, "<i4").tobytes(), params)))
    answer: list[int] = []
    while engine.has_work():
        answer += [t for e in engine.step() if isinstance(e, Tokens) for t in e.token_ids]
    assert answer == oracle_tokens(architecture)
