"""Weights estimated from configs, and what a step of a hybrid reads."""

from pathlib import Path

import pytest

from kvell.cost.analytic import ModelCost
from kvell.engine.requests.plan import TokenWork
from kvell.models.config.config_fields import text_config
from kvell.models.config.configs import config_from_dict, read_config
from kvell.models.config.description import describe
from kvell.pages.layout import GroupKind, LayerSpec
from kvell.simulator.hardware.model_cost import layer_costs, model_cost
from tests.engine.works import work_of

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
PUBLISHED = {
    "deepseek-v2-lite": 15.7,
    "falcon-h1-7b": 7.6,
    "gemma2-9b": 9.2,
    "gemma3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "jamba-mini": 51.6,
    "kimi-linear-48b": 48.0,
    "lfm2-1.2b": 1.2,
    "llama-3.2-11b-vision": 9.8,
    "llama4-scout": 107.0,
    "nemotron-h-8b": 8.1,
    "qwen2.5-vl-7b": 7.1,
    "qwen3-next": 80.0,
    "zamba2-7b": 7.4,
}
"""Billions of weights of the published language models."""


def token_work(start: int, count: int) -> TokenWork:
    return work_of("0", 1, start, count)


def estimate(name: str) -> ModelCost:
    config = read_config(CONFIGS / f"{name}.json")
    return model_cost(config, describe(config, 2), 2)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_shape_has_a_cost(name: str) -> None:
    cost = estimate(name)
    assert 0 < 2 * cost.active_weights <= cost.weight_bytes
    assert cost.query_size > 0


@pytest.mark.parametrize(("name", "billions"), sorted(PUBLISHED.items()))
def test_weights_are_about_the_published_ones(name: str, billions: float) -> None:
    assert 0.7 < estimate(name).weight_bytes / 2e9 / billions < 1.5


def test_a_model_without_attention_has_a_cost() -> None:
    config = config_from_dict({"model_type": "mamba2"})
    cost = model_cost(config, describe(config, 2), 2)
    weights = text_config(config).vocab_size * 4096 + 64 * (6 * 4096**2 + 3 * 4096 * 4 * 4096)
    assert (cost.active_weights, cost.query_size) == (weights, 4096)


def test_a_step_reads_each_requests_state_and_leaves_images_out() -> None:
    """Two requests: two states of 1,000 bytes, tokens of 64 bytes; image groups are free."""
    layers = (
        LayerSpec(0, GroupKind.FULL, 1, 16, 2),
        LayerSpec(1, GroupKind.STATE, 0, 0, 2, state_bytes=1000),
        LayerSpec(2, GroupKind.VISION, 1, 256, 2, tensors=1),
        LayerSpec(3, GroupKind.FULL, 1, 16, 2, kv_of=0),
    )
    work = [token_work(9, 1), token_work(0, 2)]
    step = ModelCost(10, 100, 4, layer_costs(layers)).of_step(work)
    assert step.read_bytes == 100 + 64 * (10 + 2) + 2 * 1000
    assert step.flops == 2 * 10 * 3 + 4 * 4 * (1 * (1 + 9) + 2 * (1 + 1))
