"""What is described and planned, against transformers' own caches of the same configs.

Every config is cut down in depth alone, to two layers of each kind, its model is built on
the meta device in bfloat16, reads one token and then another, and the bytes of the tensors
in its cache are counted.  All twenty run on meta; only PaliGemma's text is called by itself,
because the whole asks values of tensors.  Where transformers keeps something else than we
store, the relation is exact and stated:

- keys and values, latents (MLA: the latent as key, its rope part as value), cross-attention:
  the same bytes;
- sliding and chunked: the same per token, and it keeps a token less than the window, because
  the next one, which the window counts, is added before it reads;
- states: the convolution's window has one column more (the next input's), and the recurrent
  part is float32 always, which we store in the model's dtype unless config or family says
  float32;
- layers that share another's keys and values: none in either.
"""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from kvell.models.config.configs import config_from_dict, read_config
from kvell.models.config.description import describe
from kvell.pages.layout import GroupKind, LayerSpec
from kvell.pages.sizing import MANAGERS, plan_layout
from kvell.vocabulary import GIB
from tests.models.cases import covering, some_fast

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
WINDOWED = [
    "gemma2-9b",
    "gemma3-27b",
    "gemma3n-e4b",
    "gpt-oss-20b",
    "llama4-scout",
    "ministral-8b",
    "paligemma2-10b",
]
STATES = [
    "falcon-h1-7b",
    "jamba-mini",
    "kimi-linear-48b",
    "lfm2-1.2b",
    "nemotron-h-8b",
    "qwen3-next",
    "zamba2-7b",
]
FLOAT32_STATES = {"kimi-linear-48b", "nemotron-h-8b"}
"""By the family's own rule, and by ``mamba_ssm_cache_dtype``."""
KERNELS = dict.fromkeys(STATES, 4) | {"lfm2-1.2b": 3}
IMAGES = ["llava-onevision-7b", "paligemma2-10b", "qwen2.5-vl-7b"]
IMAGE_TOKENS = 5
DEPTHS: dict[str, dict[str, Any]] = {
    "gemma3n-e4b": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_kv_shared_layers": 4,
    },
    "jamba-mini": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "llama-3.2-11b-vision": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    "nemotron-h-8b": {"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*-*"},
}
"""Fields that say the depth, where they are not a list of types or a number alone."""

STEPS = [pytest.param((1,), id="one"), pytest.param((1, 1), id="two")]
FAST = (
    "deepseek-v2-lite",
    "gemma3n-e4b",
    "gpt-oss-20b",
    "jamba-mini",
    "lfm2-1.2b",
    "llama-3.2-11b-vision",
    "llama4-scout",
    "nemotron-h-8b",
)
CONFIGURED = some_fast(NAMES, FAST)
every_config = pytest.mark.parametrize("name", CONFIGURED)


def two_of_each(types: list[str]) -> list[str]:
    return [kind for i, kind in enumerate(types) if types[:i].count(kind) < 2]


@cache
def shallow(name: str) -> Any:
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    text = raw.get("text_config", raw)
    field = next((f for f in ("layer_types", "layers_block_type") if f in text), None)
    types = {field: two_of_each(text[field])} if field else {}
    count = len(next(iter(types.values()), "22"))
    text.update(DEPTHS.get(name) or {"num_hidden_layers": count, **types})
    encoder = raw.get("vision_config", {})
    for depth in {"depth", "num_hidden_layers", "num_global_layers"} & encoder.keys():
        encoder[depth] = 2
    return config_from_dict(raw)


@cache
def module_of(name: str) -> Any:
    config = copy.deepcopy(shallow(name))
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, dtype=torch.bfloat16).eval()


def runner_of(name: str) -> Any:
    module = module_of(name)
    return module.model.language_model if name == "paligemma2-10b" else module


def cache_after(name: str, *steps: int) -> Any:
    """transformers' cache when so many tokens have been read, step by step."""
    held: Any = None
    images: dict[str, Any] = {}
    if name == "llama-3.2-11b-vision":
        size = shallow(name).text_config.hidden_size
        images = {"cross_attention_states": empty(1, IMAGE_TOKENS, size)}
    for tokens in steps:
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        with torch.no_grad():
            held = runner_of(name)(
                input_ids=ids, past_key_values=held, use_cache=True, **images
            ).past_key_values
        images = {}
    return held


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16)


def specs(name: str) -> dict[int, list[LayerSpec]]:
    layers = describe(shallow(name), 2).layers
    text = [layer for layer in layers if layer.kind is not GroupKind.VISION]
    count = 1 + max(layer.index for layer in text)
    return {i: [layer for layer in text if layer.index == i] for i in range(count)}


def held_bytes(layer: Any) -> int:
    found = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return sum(t.numel() * t.itemsize for t in found if t is not None)


def recurrent_of(layer: Any) -> list[torch.Tensor]:
    return [t for t in getattr(layer, "recurrent_states", {}).values() if t is not None]


def windows_of(layer: Any) -> list[torch.Tensor]:
    return [t for t in getattr(layer, "conv_states", {}).values() if t is not None]


def shape_of(layer: LayerSpec) -> tuple[Any, ...]:
    shared = layer.kv_of is not None
    return (layer.kind, layer.window_tokens, layer.token_bytes, layer.tensors, shared)


@every_config
def test_only_the_depth_is_cut(name: str) -> None:
    full, cut = describe(read_config(CONFIGS / f"{name}.json"), 2), describe(shallow(name), 2)
    assert {shape_of(layer) for layer in full.layers} == {shape_of(layer) for layer in cut.layers}
    counts = [shape_of(layer) for layer in cut.layers if layer.kind is not GroupKind.VISION]
    assert all(counts.count(shape) >= 2 for shape in counts)
    assert (full.hidden_size, full.query_heads) == (cut.hidden_size, cut.query_heads)


@covering({"name": CONFIGURED, "steps": STEPS}, together=1)
def test_keys_and_values_are_as_many_bytes(name: str, steps: tuple[int, ...]) -> None:
    held, expected = cache_after(name, *steps), specs(name)
    attending = 0
    for index, layers in expected.items():
        attention = [layer for layer in layers if layer.kind is not GroupKind.STATE]
        own = [layer for layer in attention if layer.kv_of is None]
        found = held.layers[index] if index < len(held.layers) else None
        units = [IMAGE_TOKENS if x.kind is GroupKind.CROSS else sum(steps) for x in own]
        sizes = [n * layer.token_bytes for n, layer in zip(units, own, strict=True)]
        assert held_bytes(found) == sum(sizes), (index, attention)
        attending += len(own)
    assert attending >= 2


@every_config
def test_groups_are_sums_of_those_bytes(name: str) -> None:
    """The plan's bytes per token and per state, by group: those of its layers together."""
    held = cache_after(name, 1)
    layers = describe(shallow(name), 2).layers
    for group in plan_layout(layers, 16 * GIB).groups:
        if group.kind is GroupKind.VISION:
            continue
        if group.kind is GroupKind.STATE:
            kept = sum(stored_bytes(name, held.layers[index]) for index in group.layers)
        else:
            kept = sum(held_bytes(held.layers[index]) for index in group.layers)
        units = IMAGE_TOKENS if group.kind is GroupKind.CROSS else 1
        assert units * group.token_bytes == kept
        assert group.page_bytes * group.slices == kept // units * group.page_tokens


@pytest.mark.parametrize("name", some_fast(WINDOWED, FAST))
def test_a_window_counts_the_token_that_is_not_yet_cached(name: str) -> None:
    windows = {x.window_tokens for layers in specs(name).values() for x in layers} - {0}
    (window,) = windows
    held = cache_after(name, window + 3)
    for index, (layer, *_) in specs(name).items():
        if layer.kv_of is None:
            kept = layer.window_tokens - 1 if layer.window_tokens else window + 3
            assert held_bytes(held.layers[index]) == kept * layer.token_bytes


def stored_bytes(name: str, layer: Any) -> int:
    kernel, element_bytes = KERNELS[name], 4 if name in FLOAT32_STATES else 2
    window = sum(t.numel() * t.itemsize * (kernel - 1) // kernel for t in windows_of(layer))
    return window + sum(t.numel() * element_bytes for t in recurrent_of(layer))


@covering({"name": some_fast(list(STATES), FAST), "steps": STEPS}, together=1)
def test_states_have_as_many_numbers(name: str, steps: tuple[int, ...]) -> None:
    held, count = cache_after(name, *steps), 0
    for index, layers in specs(name).items():
        found = held.layers[index]
        sizes = [layer.state_bytes for layer in layers if layer.kind is GroupKind.STATE]
        assert len(windows_of(found)) == len(sizes)
        assert all(t.shape[-1] == KERNELS[name] and t.itemsize == 2 for t in windows_of(found))
        assert all(t.dtype == torch.float32 for t in recurrent_of(found))
        assert len(recurrent_of(found)) == (0 if name == "lfm2-1.2b" else len(sizes))
        assert stored_bytes(name, found) == sum(sizes)
        count += len(sizes)
    assert count >= 2


@pytest.mark.parametrize("name", sorted(set(STATES) - {"lfm2-1.2b"}))
def test_states_of_a_float32_model_are_transformers_own(name: str) -> None:
    """Nothing is narrowed then: the recurrent part is equal in bytes, too."""
    (held, *_) = (x for x in cache_after(name, 1).layers if recurrent_of(x))
    sizes = {x.state_bytes for x in describe(shallow(name), 4).layers if x.state_bytes}
    window = sum(t.numel() * 4 * (KERNELS[name] - 1) // KERNELS[name] for t in windows_of(held))
    assert sizes == {window + sum(t.numel() * t.itemsize for t in recurrent_of(held))}


def test_the_lists_of_kinds_are_complete() -> None:
    def having(test: Any) -> list[str]:
        return [n for n in NAMES if any(test(x) for x in describe(shallow(n), 2).layers)]

    assert having(lambda x: x.window_tokens) == WINDOWED
    assert having(lambda x: x.state_bytes) == STATES
    assert having(lambda x: x.kind is GroupKind.VISION) == IMAGES
    assert having(lambda x: x.kind is GroupKind.CROSS) == ["llama-3.2-11b-vision"]
    assert having(lambda x: x.kv_of is not None) == ["gemma3n-e4b"]


def test_gemma3n_has_no_cache_where_layers_share() -> None:
    own = [i for i, (layer,) in specs("gemma3n-e4b").items() if layer.kv_of is None]
    assert own == list(range(len(cache_after("gemma3n-e4b", 1).layers))) == [0, 1, 2, 3]


def test_expanded_heads_would_be_many_times_a_latent() -> None:
    """What transformers cached before it had latents, and others still do."""
    config, ((layer,), *_) = shallow("deepseek-v2-lite"), specs("deepseek-v2-lite").values()
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    expanded = config.num_attention_heads * (key + config.v_head_dim) * 2
    assert (layer.token_bytes, expanded) == (1_152, 10_240)


def image_features(name: str) -> torch.Tensor:
    """The encoder's output for one image, on meta: [tokens, size] or [1, tokens, size]."""
    model = module_of(name).model
    with torch.no_grad():
        if name == "llava-onevision-7b":
            sizes = torch.tensor([[384, 700]])
            found = model.get_image_features(empty(1, 3, 3, 384, 384), sizes).pooler_output[0]
        elif name == "paligemma2-10b":
            found = model.get_image_features(empty(1, 3, 448, 448)).pooler_output
        else:  # its encoder asks values of tensors; this is the last module of it
            side = model.visual.spatial_merge_size**2
            found = model.visual.merger(empty(4 * side, model.config.vision_config.hidden_size))
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_an_embedding_is_what_the_encoder_gives_for_a_token(name: str) -> None:
    found = image_features(name)
    layer = describe(shallow(name), 2).layers[-1]
    assert (layer.kind, layer.tensors) == (GroupKind.VISION, 1)
    assert found.shape[-2] > 1
    assert layer.token_bytes == found.shape[-1] * found.itemsize


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
