"""Engines whose activations share the pool with the KV cache."""

import numpy as np
import torch

from kvell.elastic.memory import ElasticMemory
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.core.journal import Journal
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.models.loading.random_weights import random_module
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.models.fused_models import fused_model
from tests.models.harness import tiny_config

SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def wide_module() -> torch.nn.Module:
    """A small model, wide enough that a step's activations take several chunks."""
    config = tiny_config(
        "Gemma3ForCausalLM",
        hidden_size=256,
        intermediate_size=2048,
        head_dim=64,
        num_hidden_layers=6,
        max_position_embeddings=32_768,
    )
    module: torch.nn.Module = random_module(config, 3, torch.float32, 8.0)
    return module


def engine_over(
    module: torch.nn.Module, options: EngineOptions, journal: Journal | None = None
) -> Engine:
    return build_engine(fused_model(module), "wide", options, journal=journal)


def weights_of(module: torch.nn.Module) -> int:
    return fused_model(module).weight_bytes


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Long and short prompts, some with a shared beginning."""
    draw = np.random.default_rng(seed)
    made: list[list[int]] = []
    for index in range(count):
        length = int(draw.integers(3, 700))
        shared = made[-1][: length // 2] if index % 3 == 2 else []
        made.append([*shared, *draw.integers(3, 509, length - len(shared)).tolist()])
    return made


def answers(engine: Engine, asked: list[list[int]], at_once: int = 8) -> dict[str, list[int]]:
    """Return the tokens of every request; new ones arrive while others run."""
    tokens: dict[str, list[int]] = {}
    waiting = list(enumerate(asked))
    while waiting or engine.has_work():
        while waiting and len(tokens) - _ended(engine) < at_once:
            index, prompt = waiting.pop(0)
            tokens[str(index)] = []
            ids = np.asarray(prompt, "<i4").tobytes()
            assert is_accepted(
                engine.handle(Submit(RequestSpec(RequestId(str(index)), ids, SAMPLING)))
            )
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens[event.request_id] += event.token_ids
            if isinstance(event, Finished):
                assert event.reason == "length"
    return tokens


def _ended(engine: Engine) -> int:
    return sum(engine.core.stats().finished.values())


def elastic_of(engine: Engine) -> ElasticMemory:
    steps = engine.core.scheduler.chunks.memory
    assert isinstance(steps, SharedMemory)
    return steps.memory


def roomy(module: torch.nn.Module, pool_mib: int = 16, **changes: object) -> EngineOptions:
    bound = weights_of(module) + pool_mib * MIB
    wished = {"memory_bytes": bound, "max_num_batched_tokens": 512, "max_model_len": 1024}
    return EngineOptions(**(wished | changes))  # type: ignore[arg-type]


class Watched:
    def __init__(self, runner: Runner) -> None:
        self.runner, self.plans = runner, list[StepPlan]()

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self.runner.run(plan)
