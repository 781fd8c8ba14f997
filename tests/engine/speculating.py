"""Whole engines over tiny models with small vocabularies, with and without draft tokens."""

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import ModelRunner, Runner
from kvell.memory import Layout, audit
from kvell.models.loading.loading import describe_as
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.models.harness import tiny_config

WORDS = 13
"""Vocabulary size; so small that draft tokens are sometimes right."""
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=20, ignore_eos=True)


@cache
def words_module(architecture: str, seed: int = 3, words: int = WORDS) -> Any:
    return random_module(tiny_config(architecture, vocab_size=words), seed, scale=8.0)


def model_of(module: Any) -> PagedModel:
    description = describe_as(module.config, torch.float32, torch.float32)
    return PagedModel(copy.deepcopy(module), description, choose_kernels(torch.device("cpu")))


def blurred(module: Any, noise: float) -> Any:
    """The same model with noise: its draft tokens are often right, but not always."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            deviation = parameter.std() if parameter.numel() > 1 else parameter.abs().sum()
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.add_(draw * deviation * noise)
    return other


@dataclass
class Served:
    """Requests of one engine, and what was planned for them; audited after every step."""

    engine: Engine
    outputs: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    ended: dict[str, Finished] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner: Runner = self.engine.runner
        self.engine.runner = self

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self.runner.run(plan)

    @property
    def layout(self) -> Layout:
        return self.engine.core.memory.layout

    @property
    def pool(self) -> torch.Tensor:
        assert isinstance(self.runner, ModelRunner)
        return self.runner.pages.pool

    @property
    def stats(self) -> Stats:
        return self.engine.core.stats()

    def ask(self, prompts: dict[str, list[int]], sampling: SamplingParams) -> None:
        self.ask_each({name: (prompt, sampling) for name, prompt in prompts.items()})

    def ask_each(self, wishes: dict[str, tuple[list[int], SamplingParams]]) -> None:
        """Run requests of different sampling at once to their ends."""
        for name, (prompt, sampling) in wishes.items():
            self.outputs[name] = []
            ids = np.asarray(prompt, "<i4").tobytes()
            assert is_accepted(
                self.engine.handle(Submit(RequestSpec(RequestId(name), ids, sampling)))
            )
        while self.engine.has_work():
            for event in self.engine.step():
                if isinstance(event, Tokens):
                    self.outputs[event.request_id] += event.token_ids
                    self.logprobs.setdefault(event.request_id, []).extend(event.logprobs)
                elif isinstance(event, Finished):
                    self.ended[event.request_id] = event
            assert audit(self.layout, self.engine.core.memory.snapshot()) == []


def served(
    module: Any,
    draft_tokens: int = 0,
    draft: Any = None,
    *,
    kv_bytes: int = 8 * MIB,
    batched: int = 256,
    shortest: int = 1,
    cpu_buffer_bytes: int | None = None,
) -> Served:
    options = EngineOptions(
        kv_memory_bytes=kv_bytes,
        max_model_len=128,
        max_num_batched_tokens=batched,
        num_speculative_tokens=draft_tokens,
        prompt_lookup_min=shortest,
        prompt_lookup_max=max(3, shortest),
        cpu_buffer_bytes=cpu_buffer_bytes,
        copies_under_pass=True,
    )
    drafter = None if draft is None else model_of(draft)
    run = Served(build_engine(model_of(module), "tiny", options, draft=drafter))
    run.pool.fill_(0xFF)  # not a number, wherever nothing was written
    return run


def prompts(count: int, seed: int = 0, words: int = WORDS) -> dict[str, list[int]]:
    """Prompts of 20 to 70 tokens; a third of them begin like the first."""
    draw = np.random.default_rng(seed)
    made: dict[str, list[int]] = {}
    first: list[int] = []
    for index in range(count):
        own = draw.integers(3, words, int(draw.integers(20, 71))).tolist()
        first = first or own
        made[f"q{seed}-{index}"] = own if index % 3 else [*first[:32], *own[:30]]
    return made
