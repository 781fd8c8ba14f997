"""Every shape that benches replay is described and sized, by every manager."""

from pathlib import Path

import pytest

from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.pages.layout import GroupKind
from kvell.pages.sizing import MANAGERS, plan_layout
from kvell.vocabulary import GIB

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
SHAPES = {
    "deepseek-v2-lite": {"full": 27},
    "falcon-h1-7b": {"full": 44, "state": 44},
    "gemma2-9b": {"sliding": 21, "full": 21},
    "gemma3-27b": {"sliding": 52, "full": 10},
    "gemma3n-e4b": {"sliding": 16, "full": 4},
    "gpt-oss-20b": {"sliding": 12, "full": 12},
    "jamba-mini": {"state": 28, "full": 4},
    "kimi-linear-48b": {"state": 20, "full": 7},
    "lfm2-1.2b": {"state": 10, "full": 6},
    "llama-3.2-11b-vision": {"full": 32, "cross": 8},
    "llama3-8b": {"full": 32},
    "llama4-scout": {"chunked": 36, "full": 12},
    "llava-onevision-7b": {"full": 28, "vision": 1},
    "ministral-8b": {"full": 9, "sliding": 27},
    "nemotron-h-8b": {"state": 24, "full": 4},
    "paligemma2-10b": {"sliding": 21, "full": 21, "vision": 1},
    "qwen2.5-vl-7b": {"full": 28, "vision": 1},
    "qwen3-8b": {"full": 36},
    "qwen3-next": {"state": 36, "full": 12},
    "zamba2-7b": {"state": 81, "full": 13},
}


def test_there_are_twenty_shapes_and_a_row_for_each() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.json")) == sorted(SHAPES)
    rows = (CONFIGS / "README.md").read_text()
    assert all(f"| `{name}` |" in rows for name in SHAPES)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_layers_that_store_something(name: str) -> None:
    description = describe(read_config(CONFIGS / f"{name}.json"), 2)
    counts = dict.fromkeys((str(layer.kind) for layer in description.layers), 0)
    for layer in description.layers:
        counts[str(layer.kind)] += layer.kv_of is None
    assert counts == SHAPES[name]
    assert description.max_model_len >= 131_072
    assert description.images_in_text == (name != "llama-3.2-11b-vision")


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_manager_cuts_it(name: str) -> None:
    layers = describe(read_config(CONFIGS / f"{name}.json"), 2).layers
    for manager in MANAGERS:
        layout = plan_layout(layers, 16 * GIB, manager=manager)
        kept = sum(layer.kv_of is None for layer in layers)
        assert sum(len(group.layers) for group in layout.groups) == kept
        if manager == "kvell":
            assert all(g.padding_bytes <= 0.01 * g.page_bytes for g in layout.groups)


def test_peer_states_are_those_of_the_peers_table() -> None:
    """(8192, 3) + (8192, 16) bf16; (8192, 3) + (32, 128, 128) bf16; (10240, 3) bf16 + fp32."""
    expected = {
        "jamba-mini": 2 * (8192 * 3 + 8192 * 16),
        "qwen3-next": 2 * (8192 * 3 + 32 * 128 * 128),
        "nemotron-h-8b": 2 * 10240 * 3 + 4 * 128 * 64 * 128,
    }
    for name, size_bytes in expected.items():
        layers = describe(read_config(CONFIGS / f"{name}.json"), 2).layers
        assert {x.state_bytes for x in layers if x.kind is GroupKind.STATE} == {size_bytes}
