"""A fused pass with states in the whole engine: hits, preemption, one pool with activations."""

import pytest
import torch

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.models.loading.random_weights import random_module
from kvell.vocabulary import MIB
from tests.elastic.balloon_audit import audit_elastic
from tests.engine.setup.shared_pool import answers, elastic_of, engine_over, prompts, weights_of
from tests.models.fused_models import generic_model
from tests.models.harness import tiny_config


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    config = tiny_config("FalconH1ForCausalLM", hidden_size=128, max_position_embeddings=4096)
    made: torch.nn.Module = random_module(config, 3, torch.float32, 8.0)
    return made


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """Prompts, some with a shared beginning, whose states are resumed."""
    return prompts(14)


@pytest.fixture(scope="module")
def expected(module: torch.nn.Module, asked: list[list[int]]) -> dict[str, list[int]]:
    """Answers of transformers' own code, in a pool that holds all requests."""
    engine = build_engine(
        generic_model(module),
        "generic",
        EngineOptions(kv_memory_bytes=64 * MIB, max_model_len=1024, max_num_batched_tokens=512),
    )
    made = answers(engine, asked)
    assert len({tuple(tokens) for tokens in made.values()}) == len(asked), "answers differ"
    return made


def hits(engine: Engine) -> int:
    return engine.core.stats().prefix_cache_hits


@pytest.mark.parametrize(("kv_mib", "batched"), [(64, 512), (1, 128)])
def test_answers_are_those_of_the_generic_pass(
    module: torch.nn.Module,
    asked: list[list[int]],
    expected: dict[str, list[int]],
    kv_mib: int,
    batched: int,
) -> None:
    """With room for all, and where requests are preempted."""
    options = EngineOptions(
        kv_memory_bytes=kv_mib * MIB, max_model_len=1024, max_num_batched_tokens=batched
    )
    engine = engine_over(module, options)
    assert answers(engine, asked) == expected
    assert hits(engine) >= 64 if kv_mib > 1 else engine.core.stats().preemptions > 0


def test_states_and_activations_share_one_pool(
    module: torch.nn.Module, asked: list[list[int]], expected: dict[str, list[int]]
) -> None:
    options = EngineOptions(
        memory_bytes=weights_of(module) + 16 * MIB,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    engine = engine_over(module, options)
    assert answers(engine, asked) == expected
    assert engine.core.stats().rungs["deflate"] > 0, "chunks went to activations"
    assert audit_elastic(elastic_of(engine)) == []
