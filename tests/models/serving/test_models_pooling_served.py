"""Vectors from the whole engine over tiny models of several families, by both passes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.pooling import POOLED, Pooling, vector_of
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import GroupKind, audit, pool_bytes_for
from kvell.models.config.budgets import budgets_of, with_budgets
from kvell.models.config.description import describe
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import KIB, MIB, RequestId
from tests.models.cases import covering
from tests.models.forward.hidden import last_hidden_state
from tests.models.harness import prompt_ids, tiny_module
from tests.models.served import layout_of
from tests.models.serving.engines import MARKED, engine_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = {f"q{length}": prompt_ids(length) for length in (3, 90, 1, 64, 131)}
every_case = pytest.mark.parametrize(("architecture", "is_fused"), MARKED)


class Asked:
    """An engine, and what it said of every request; memory is audited after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finished] = {}

    def submit(
        self, name: str, prompt: Sequence[int], pooling: Pooling = "", params: Any = GREEDY
    ) -> None:
        self.tokens[name] = []
        ids = np.asarray(prompt, "<i4").tobytes()
        self.take(
            self.engine.handle(Submit(RequestSpec(RequestId(name), ids, params, pooling=pooling)))
        )

    def pool(self, prompts: Mapping[str, Sequence[int]]) -> None:
        for name, prompt in prompts.items():
            self.submit(name, prompt, "last", POOLED)

    def run(self) -> None:
        while self.engine.has_work():
            self.take(self.engine.step())
            memory = self.engine.core.memory
            assert audit(memory.layout, memory.snapshot()) == []

    def take(self, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.tokens[event.request_id] += event.token_ids
            elif isinstance(event, Finished):
                self.ends[event.request_id] = event


@cache
def truth(architecture: str, prompt: tuple[int, ...]) -> torch.Tensor:
    hidden = last_hidden_state(tiny_module(architecture), list(prompt))[-1]
    return torch.nn.functional.normalize(hidden, dim=0)


def check(architecture: str, asked: Asked, prompts: Mapping[str, Sequence[int]]) -> None:
    for name, prompt in prompts.items():
        end = asked.ends[name]
        assert (end.reason, end.output_tokens, asked.tokens[name]) == ("stop", 0, [])
        vector = torch.from_numpy(vector_of(end.embedding))
        expected = truth(architecture, tuple(prompt))
        assert abs(float(vector.norm()) - 1) < 1e-6
        assert float(vector @ expected) >= 1 - 1e-5
        assert float((vector - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@covering({"architecture,is_fused": MARKED, "batched": [256, 23]}, together=1)
def test_whole_and_in_chunks(architecture: str, is_fused: bool, batched: int) -> None:
    asked = Asked(engine_of(architecture, is_fused, batched=batched))
    asked.pool(PROMPTS)
    asked.run()
    check(architecture, asked, PROMPTS)


@every_case
def test_behind_a_prefix_that_another_prompt_left(architecture: str, is_fused: bool) -> None:
    asked = Asked(engine_of(architecture, is_fused))
    whole = prompt_ids(100)
    asked.submit("text", whole)
    asked.run()
    longer = {"again": whole, "longer": [*whole, *prompt_ids(9, seed=4)]}
    asked.pool(longer)
    asked.run()
    check(architecture, asked, longer)
    assert asked.ends["longer"].cached_tokens > 0
    asked.submit("after", [*longer["longer"], 5, 6])
    asked.run()
    assert asked.ends["after"].cached_tokens >= asked.ends["longer"].cached_tokens
    fresh = Asked(engine_of(architecture, is_fused))
    fresh.submit("after", [*longer["longer"], 5, 6])
    fresh.run()
    assert asked.tokens["after"] == fresh.tokens["after"]


@every_case
def test_beside_answers_that_stay_as_they_are(architecture: str, is_fused: bool) -> None:
    texts = {f"t{length}": prompt_ids(length, seed=1) for length in (40, 7, 111)}
    told = []
    for pools in (False, True):
        asked = Asked(engine_of(architecture, is_fused, batched=48))
        for index, (name, prompt) in enumerate(texts.items()):
            asked.submit(name, prompt)
            if pools:
                asked.pool(dict([list(PROMPTS.items())[index]]))
        asked.run()
        told.append({name: asked.tokens[name] for name in texts})
    assert told[0] == told[1]
    check(architecture, asked, dict(list(PROMPTS.items())[: len(texts)]))


@pytest.mark.parametrize(
    ("architecture", "is_fused", "quarters"),
    [
        ("FalconH1ForCausalLM", True, 10),
        pytest.param("Gemma3ForCausalLM", True, 8, marks=pytest.mark.long),
        pytest.param("LlamaForCausalLM", True, 10, marks=pytest.mark.long),
        ("Gemma3ForCausalLM", False, 8),
        pytest.param("Zamba2ForCausalLM", False, 10, marks=pytest.mark.long),
    ],
)
def test_after_a_preemption(architecture: str, is_fused: bool, quarters: int) -> None:
    """Answers grow while long prompts are computed a few tokens at a time.

    :param quarters: of the memory of one request, in which it happens.
    """
    kv_bytes = pool_bytes_for(layout_of(architecture), 96, 64) * quarters // 4
    asked = Asked(engine_of(architecture, is_fused, kv_bytes, 8, max_model_len=96, max_num_seqs=6))
    growing = SamplingParams(temperature=0, max_tokens=85, ignore_eos=True)
    for index in range(5):
        asked.submit(f"t{index}", prompt_ids(5 + index), params=growing)
    for _ in range(3):
        asked.take(asked.engine.step())
    vectors = {f"v{index}": prompt_ids(90 + index, seed=7) for index in range(2)}
    asked.pool(vectors)
    asked.run()
    check(architecture, asked, vectors)
    assert sum(asked.ends[name].preemptions for name in vectors) > 0


@covering(
    {"architecture": ["LlamaForCausalLM", "Gemma3ForCausalLM"], "is_fused": [True, False]},
    together=1,
)
def test_while_steps_are_planned_ahead(architecture: str, is_fused: bool) -> None:
    asked = Asked(engine_of(architecture, is_fused, batched=48, async_scheduling=True))
    assert asked.engine.core.limits.depth == 1
    for name in ("t1", "t2"):
        asked.submit(name, prompt_ids(30, seed=len(name)))
    asked.pool(PROMPTS)
    asked.run()
    check(architecture, asked, PROMPTS)
    assert [len(asked.tokens[name]) for name in ("t1", "t2")] == [12, 12]


def test_where_activations_share_the_pool() -> None:
    engine = engine_of("Gemma3ForCausalLM", True, memory_bytes=64 * MIB, batched=48)
    assert engine.contract.shared_bytes > 0
    asked = Asked(engine)
    asked.submit("t", prompt_ids(30))
    asked.pool(PROMPTS)
    asked.run()
    check("Gemma3ForCausalLM", asked, PROMPTS)


def test_beside_a_request_with_controls() -> None:
    """Its rows go another way from logits to tokens."""
    asked = Asked(engine_of("LlamaForCausalLM", True, batched=64))
    scored = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
    asked.submit("scored", prompt_ids(40), params=scored)
    asked.submit("penalised", prompt_ids(33), params=SamplingParams(presence_penalty=1.0, seed=1))
    asked.pool(PROMPTS)
    asked.run()
    check("LlamaForCausalLM", asked, PROMPTS)
    assert len(asked.tokens["scored"]) == 6


def test_of_a_prompt_that_keeps_only_a_budget_of_its_tokens() -> None:
    """Tokens are dropped once the prompt is computed, so its vector is exact."""
    module = copy.deepcopy(tiny_module("LlamaForCausalLM"))
    description = describe(module.config, 4)
    layers = with_budgets(description.layers, budgets_of(description.layers, "48"))
    kernels = choose_kernels(torch.device("cpu"))
    model = PagedModel(module, replace(description, layers=layers), kernels)
    asked = Asked(
        build_engine(
            model,
            "llama",
            EngineOptions(kv_memory_bytes=8 * MIB, max_model_len=256, max_num_batched_tokens=64),
        )
    )
    asked.pool(PROMPTS)
    asked.run()
    assert any(group.kind is GroupKind.DROPPING for group in asked.engine.core.memory.layout.groups)
    check("LlamaForCausalLM", asked, PROMPTS)


def test_the_longest_prompt_in_the_smallest_pool() -> None:
    for architecture in ("LlamaForCausalLM", "Gemma3ForCausalLM"):
        kv_bytes = pool_bytes_for(layout_of(architecture), 96, 64)
        asked = Asked(engine_of(architecture, True, kv_bytes + KIB, 64, max_model_len=96))
        prompts = {"full": prompt_ids(96), "again": prompt_ids(96), "other": prompt_ids(96, 3)}
        asked.pool(prompts)
        asked.run()
        check(architecture, asked, prompts)
        asked.pool({"long": prompt_ids(97)})
        assert (asked.ends["long"].reason, asked.ends["long"].field) == ("refused", "prompt")
