"""Layers, windows and sizes from configs alone; the guard in front of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import BOUNDLESS_TOKENS
from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import architecture, describe
from kvell.models.config.layer_kinds import kv_sources, layer_types
from kvell.models.families.families import EXACT, WITH_IMAGES, require_exact
from kvell.pages.layout import GroupKind
from kvell.pages.sizing import plan_layout
from kvell.vocabulary import GIB
from tests.models.harness import FAMILIES, SMALL, tiny_config


def windows(config: Any) -> list[int]:
    return [layer.window_tokens for layer in describe(config, 2).layers]


def test_llama_layers() -> None:
    config = config_from_dict(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vocab_size": 99,
        }
    )
    description = describe(config, kv_element_bytes=2)
    assert description.architecture == "LlamaForCausalLM"
    assert [layer.index for layer in description.layers] == [0, 1]
    layer = description.layers[1]
    assert (layer.kind, layer.window_tokens) == (GroupKind.FULL, 0)
    assert (layer.kv_heads, layer.head_size, layer.token_bytes) == (2, 16, 2 * 2 * 16 * 2)
    assert (description.query_heads, description.hidden_size) == (4, 64)
    assert (description.max_model_len, description.vocab_size) == (512, 99)


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    config = tiny_config("Qwen3ForCausalLM", head_dim=40)
    assert {layer.head_size for layer in describe(config, 2).layers} == {40}


def test_kv_heads_default_to_the_query_heads() -> None:
    config = transformers.LlamaConfig(**SMALL | {"num_key_value_heads": None})
    assert describe(config, 2).layers[0].kv_heads == 4


def test_element_bytes_are_those_of_the_kv_cache() -> None:
    config = tiny_config("LlamaForCausalLM")
    assert [describe(config, size).layers[0].element_bytes for size in (1, 2, 4)] == [1, 2, 4]


def test_text_config_of_a_multimodal_model_is_found() -> None:
    text = {"num_hidden_layers": 6, "sliding_window": 1024, "vocab_size": 1000}
    config = config_from_dict({"model_type": "gemma3", "text_config": text})
    assert windows(config)[:6] == [1024] * 5 + [0]
    assert describe(config, 2).vocab_size == 1000


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def test_quantised_elements_bring_their_scales() -> None:
    """One float32 scale for the latent; one for each head's key and value."""
    latent = describe(config_from_dict(DEEPSEEK_V3), 1, kv_scale_bytes=4).layers[0]
    assert latent.token_bytes == 576 + 4
    heads = describe(tiny_config("Qwen3ForCausalLM", head_dim=40), 1, kv_scale_bytes=4).layers[0]
    assert heads.token_bytes == 2 * heads.kv_heads * (40 + 4)


def test_gemma3n_layers_that_share_store_nothing() -> None:
    """The last 15 of 35 read layer 18, the last sliding one before them, or 19, the last full."""
    layers = describe(config_from_dict({"model_type": "gemma3n_text"}), 2).layers
    assert [layer.kv_of for layer in layers[:20]] == [None] * 20
    assert [layer.kv_of for layer in layers[20:]] == [18, 18, 18, 18, 19] * 3
    assert {layer.token_bytes for layer in layers[:20]} == {2 * 2 * 256 * 2}
    assert {layer.token_bytes for layer in layers[20:]} == {0}
    sliding, full = plan_layout(layers, GIB).groups
    assert full.layers == (4, 9, 14, 19)
    assert sliding.layers == tuple(i for i in range(20) if i not in full.layers)


def test_sharing_that_would_leave_no_layer_of_its_own_is_none() -> None:
    text = SimpleNamespace(num_kv_shared_layers=15)
    assert kv_sources(text, ["full_attention"] * 15) == {}
    assert kv_sources(text, ["full_attention"] * 16) == dict.fromkeys(range(1, 16), 0)


def test_gemma4_full_layers_have_larger_heads() -> None:
    layers = describe(config_from_dict({"model_type": "gemma4_text"}), 2).layers
    assert [layer.head_size for layer in layers[:6]] == [256] * 5 + [512]


def test_an_index_beside_keys_and_values_is_refused() -> None:
    text = SimpleNamespace(**SMALL, model_type="sparse", index_head_dim=128)
    with pytest.raises(ChangeSomething, match="stores an index"):
        describe(text, 2)


def test_mistral_window_holds_for_every_layer() -> None:
    assert windows(tiny_config("MistralForCausalLM")) == [9, 9, 9]
    assert windows(tiny_config("MistralForCausalLM", sliding_window=None)) == [0, 0, 0]


def test_qwen2_window_that_is_switched_off() -> None:
    config = transformers.Qwen2Config(**SMALL, sliding_window=32, use_sliding_window=False)
    assert windows(config) == [0, 0, 0]


def test_pattern_of_configs_without_layer_types() -> None:
    text = SimpleNamespace(num_hidden_layers=5, sliding_window=8, sliding_window_pattern=3)
    full, sliding = "full_attention", "sliding_attention"
    assert layer_types(text, "m") == (sliding, sliding, full, sliding, sliding)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("linear_attention", "state's shape is not known"),
        ("conv", "state's shape is not known"),
        ("compressed_sparse_attention", "'compressed_sparse_attention', whose memory"),
    ],
)
def test_layers_of_unknown_memory_are_refused(kind: str, problem: str) -> None:
    config = SimpleNamespace(
        model_type="odd",
        architectures=["OddForCausalLM"],
        num_hidden_layers=2,
        layer_types=["full_attention", kind],
        num_attention_heads=2,
        hidden_size=32,
        vocab_size=10,
        max_position_embeddings=64,
    )
    with pytest.raises(ChangeSomething, match=problem) as caught:
        describe(config, 2)
    assert caught.value.field == "model"
    assert caught.value.value == "OddForCausalLM"


def test_an_index_beside_a_latent_is_one_more_vector() -> None:
    """DeepSeek V3.2: a latent of 512 + 64 and an index of 128 for each token."""
    layers = describe(config_from_dict({"model_type": "deepseek_v32"}), 2).layers
    assert {(layer.tensors, layer.token_bytes) for layer in layers} == {(1, (576 + 128) * 2)}


def test_keys_and_values_of_unlike_sizes_lie_side_by_side() -> None:
    """MiMo V2: a head's key has 192 numbers, its value 128; 4 heads."""
    layer = describe(config_from_dict({"model_type": "mimo_v2_flash"}), 2).layers[0]
    assert layer.token_bytes == 4 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"model_type": "falcon", "multi_query": True}, 1),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"model_type": "gpt_bigcode"}, 1),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": 4}, "n_heads": 16}, 4),
        ({"model_type": "gpt2"}, 12),
    ],
)
def test_kv_heads_under_older_names(fields: dict[str, Any], heads: int) -> None:
    assert {layer.kv_heads for layer in describe(config_from_dict(fields), 2).layers} == {heads}


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "bloom", "t5", "recurrent_gemma", "mpt"])
def test_a_length_is_known_or_nothing_bounds_it(model_type: str) -> None:
    lengths = {"rwkv": 1024, "mpt": 2048}
    description = describe(config_from_dict({"model_type": model_type}), 2)
    assert description.max_model_len == lengths.get(model_type, BOUNDLESS_TOKENS)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        (YARN | {"original_max_position_embeddings": 100}, 400),
        (YARN, 4 * 256),
        (YARN | {"original_max_position_embeddings": 10}, 256),
        (LINEAR, 640),
        (LINEAR | {"rope_type": "dynamic"}, 256),
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
    ],
)
def test_scaled_rotations_make_the_context_longer(rope: dict[str, Any], tokens: int) -> None:
    config = tiny_config("LlamaForCausalLM", rope_parameters=rope)
    assert describe(config, 2).max_model_len == tokens


def test_scaling_of_some_layers_is_counted_in_already() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"full_attention": LINEAR, "sliding_attention": plain}
    config = tiny_config("Gemma3ForCausalLM", rope_parameters=rope)
    assert describe(config, 2).max_model_len == 256


def test_bidirectional_attention_is_refused() -> None:
    config = tiny_config("Gemma3ForCausalLM", use_bidirectional_attention=True)
    with pytest.raises(ChangeSomething, match="bidirectional"):
        describe(config, 2)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_missing_size_is_named(missing: str) -> None:
    config = SimpleNamespace(**{**SMALL, "model_type": "some", missing: None})
    with pytest.raises(ChangeSomething, match=missing):
        describe(config, 2)


def test_architecture_falls_back_to_the_model_type() -> None:
    assert architecture(SimpleNamespace(architectures=None, model_type="llama")) == "llama"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tested_families_pass_the_guard(name: str) -> None:
    require_exact(name)
    assert describe(tiny_config(name), 4).architecture == name


def test_other_families_are_refused() -> None:
    with pytest.raises(ChangeSomething, match="not among") as caught:
        require_exact("SomethingNobodyTested")
    assert caught.value.value == "SomethingNobodyTested"


def test_no_architecture_is_both_of_text_and_of_images() -> None:
    assert not EXACT & set(WITH_IMAGES)
