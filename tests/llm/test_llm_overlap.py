"""Planned ahead, models answer as they do in turn: to the token, in every dtype."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.serving.lone import LocalInstance
from kvell.vocabulary import KIB, RequestId
from tests.llm.exactness import assert_same, cut, prompts_with_shared_halves, read_oracle, smollm2
from tests.models.harness import tiny_module
from tests.models.random_model import random_paged_model

OUTPUT_TOKENS = 24
ROOMY_KIB = 4096


def engine_of(
    architecture: str, dtype: torch.dtype, ahead: bool, journal: Journal, **options: Any
) -> Engine:
    config = tiny_module(architecture).config
    model = random_paged_model(config, choose_kernels(torch.device("cpu")), 3, dtype)
    wished = {"kv_memory_bytes": ROOMY_KIB * KIB, "max_model_len": 96} | options
    return build_engine(
        model, architecture, EngineOptions(async_scheduling=ahead, **wished), journal=journal
    )


def params_of(index: int) -> SamplingParams:
    """Some greedy, some drawn; some end where they may say a token."""
    return SamplingParams(
        temperature=0.8 if index % 3 == 1 else 0,
        seed=index,
        max_tokens=OUTPUT_TOKENS - index % 5,
        stop_token_ids=tuple(range(0, 512, 17)) if index % 4 == 3 else (),
        ignore_eos=True,
    )


def answers(engine: Engine) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    instance = LocalInstance(engine)
    outputs: dict[str, list[int]] = {}
    ends: dict[str, Finished] = {}
    for index, (name, prompt) in enumerate(prompts_with_shared_halves(8).items()):
        ids = np.asarray(prompt, "<i4").tobytes()
        instance.send(Submit(RequestSpec(RequestId(name), ids, params_of(index))))
        outputs[name] = []
    while instance.has_work():
        for event in instance.poll():
            if isinstance(event, Tokens):
                outputs[event.request_id] += event.token_ids
            elif isinstance(event, Finished):
                ends[event.request_id] = event
    return outputs, ends


SOON = {("LlamaForCausalLM", torch.float32, 9), ("Gemma3ForCausalLM", torch.bfloat16, 256)}


@pytest.mark.parametrize(
    ("architecture", "dtype", "batched"),
    [
        pytest.param(*case, marks=() if case in SOON else pytest.mark.long)
        for case in itertools.product(
            ("LlamaForCausalLM", "Gemma3ForCausalLM"), (torch.float32, torch.bfloat16), (9, 256)
        )
    ],
)
def test_answers_are_the_same_at_both_depths(
    architecture: str, dtype: torch.dtype, batched: int
) -> None:
    journals = [Journal(), Journal()]
    in_turn, ahead = (
        engine_of(architecture, dtype, bool(depth), journal, max_num_batched_tokens=batched)
        for depth, journal in enumerate(journals)
    )
    assert (in_turn.core.limits.depth, ahead.core.limits.depth) == (0, 1)
    (expected, ends), (made, made_ends) = answers(in_turn), answers(ahead)
    assert made == expected
    reasons = {name: end.reason for name, end in made_ends.items()}
    assert reasons == {name: end.reason for name, end in ends.items()}
    assert set(reasons.values()) == {"length", "stop"}
    assert not any(ahead.core.memory.snapshot().used)
    assert ahead.arena.granted_bytes == 0


def test_a_start_says_how_steps_are_planned() -> None:
    ahead = engine_of("LlamaForCausalLM", torch.float32, True, Journal())
    assert any("planned while the previous step runs" in line for line in ahead.contract.lines())
    drafting = engine_of(
        "LlamaForCausalLM", torch.float32, True, Journal(), num_speculative_tokens=2
    )
    assert drafting.core.limits.depth == 1
    words = " ".join(" ".join(drafting.contract.lines()).split())
    assert "except after steps that may have draft tokens" in words
    in_turn = engine_of("LlamaForCausalLM", torch.float32, False, Journal())
    assert not any("planned" in line for line in in_turn.contract.lines())


@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.long)])
def test_real_weights_answer_as_transformers_says(smollm2_path: Path, count: int) -> None:
    few = [cut(answer, count) for answer in read_oracle()[:6]]
    llm = smollm2(smollm2_path.parent, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=count)
    assert_same(llm.generate([answer.prompt for answer in few], params), few)
