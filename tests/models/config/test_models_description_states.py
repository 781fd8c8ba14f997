"""States of recurrent layers and what encoders add, worked out by hand."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import FalconH1Config

from kvell.errors import ChangeSomething
from kvell.models.config.configs import config_from_dict, read_config
from kvell.models.config.description import ModelDescription, describe
from kvell.models.config.state_sizes import StateShapes, is_recurrent, state_bytes, state_shapes
from kvell.pages.layout import GroupKind, LayerSpec


def described(model_type: str, **fields: Any) -> ModelDescription:
    return describe(config_from_dict({"model_type": model_type} | fields), 2)


def states(description: ModelDescription) -> list[LayerSpec]:
    return [layer for layer in description.layers if layer.kind is GroupKind.STATE]


def one_size(description: ModelDescription) -> int:
    (size,) = {layer.state_bytes for layer in states(description)}
    return size


@pytest.mark.parametrize(
    ("model_type", "fields", "size_bytes", "counts"),
    [
        ("mamba", {"hidden_size": 768}, 2 * (1536 * 3 + 1536 * 16), {"state": 32}),
        ("falcon_mamba", {"hidden_size": 768}, 2 * (1536 * 3 + 1536 * 16), {"state": 32}),
        ("zamba", {}, 2 * (7424 * 3 + 7424 * 16), {"state": 76, "full": 13}),
        (
            "bamba",  # 128 heads of 64, one group of 128 numbers of state
            {"mamba_d_state": 128, "attn_layer_indices": [1, 3]},
            2 * ((8192 + 256) * 3 + 8192 * 128),
            {"state": 30, "full": 2},
        ),
        (
            "granitemoehybrid",
            {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
            2 * ((8192 + 512) * 3 + 8192 * 256),
            {"state": 2, "full": 1},
        ),
        ("mamba2", {}, 2 * ((8192 + 2 * 8 * 128) * 3 + 8192 * 128), {"state": 64}),
        (
            "nemotron_h",
            {"mamba_ssm_cache_dtype": "bfloat16"},  # it comes before the model's float32
            2 * (10240 * 3 + 128 * 64 * 128),
            {"state": 1, "full": 1},
        ),
        (
            "qwen3_5",  # the text part of a multimodal model
            {},
            2 * (8192 * 3 + 32 * 128 * 128),
            {"state": 24, "full": 8, "vision": 1},
        ),
        (
            "olmo_hybrid",  # 30 heads, keys of 96 and values of 192
            {},
            2 * ((2 * 30 * 96 + 30 * 192) * 3 + 30 * 96 * 192),
            {"state": 24, "full": 8},
        ),
        (
            "lfm2_moe",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "conv", "full_attention"],
            },
            2048 * 2 * 2,
            {"state": 2, "full": 1},
        ),
        ("minimax", {}, 32 * 128 * 128 * 2, {"state": 16, "full": 16}),
        ("recurrent_gemma", {}, 2560 * 3 * 2 + 2560 * 4, {"state": 18, "sliding": 8}),
        ("rwkv", {"hidden_size": 512}, 2 * 512 * 2 + 3 * 512 * 4, {"state": 32}),
        # A matrix, a normaliser and a stabiliser for each head.
        ("xlstm", {}, 8 * (256 * 512 + 256 + 1) * 4, {"state": 32}),
    ],
)
def test_states_of_families_without_a_bench_shape(
    model_type: str, fields: dict[str, Any], size_bytes: int, counts: dict[str, int]
) -> None:
    description = described(model_type, **fields)
    assert one_size(description) == size_bytes
    assert Counter(str(layer.kind) for layer in description.layers) == counts
    assert (description.query_heads == 0) == (counts.keys() == {"state"})


def test_attention_beside_states_has_a_place_and_a_size_of_its_own() -> None:
    """Zamba: 16 heads of twice the hidden size over 16 heads: 464."""
    zamba = [layer for layer in described("zamba").layers if layer.kind is GroupKind.FULL]
    assert {layer.token_bytes for layer in zamba} == {2 * 16 * 464 * 2}
    bamba = described("bamba", attn_layer_indices=[1, 3])
    assert kinds(bamba, GroupKind.FULL) == [1, 3]
    gemma = described("recurrent_gemma", attention_window_size=2048)
    assert kinds(gemma, GroupKind.SLIDING) == list(range(2, 26, 3))
    assert gemma.layers[2].window_tokens == 2048


@pytest.mark.parametrize(("element", "stored"), [(1, 2), (2, 2), (4, 4)])
def test_states_are_never_quantised(element: int, stored: int) -> None:
    config = config_from_dict({"model_type": "jamba"})
    (size,) = {x.state_bytes for x in describe(config, element, 4).layers if x.state_bytes}
    assert size == stored * (8192 * 3 + 8192 * 16)


def test_a_state_has_no_heads_and_no_scales() -> None:
    layer = describe(config_from_dict({"model_type": "jamba"}), 1, kv_scale_bytes=4).layers[0]
    assert (layer.kv_heads, layer.head_size, layer.scale_bytes) == (0, 0, 0)
    assert layer.token_bytes == layer.state_bytes


def test_a_recurrence_without_known_fields_is_refused() -> None:
    text = SimpleNamespace(hidden_size=32, mamba_d_conv=4)
    assert not is_recurrent(text)
    with pytest.raises(ChangeSomething, match="shape is not known"):
        state_shapes(text, "odd")


def test_shapes_are_told_by_fields_not_by_names() -> None:
    text = SimpleNamespace(model_type="new", conv_L_cache=5, hidden_size=10)
    assert state_shapes(text, "new") == StateShapes(channels=10, window=4, recurrent=())
    assert state_bytes(text, 2, "new") == 80


def test_numbers_that_json_has_no_word_for_are_read_as_transformers_writes_them(
    tmp_path: Path,
) -> None:
    FalconH1Config(architectures=["FalconH1ForCausalLM"]).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert tuple(read_config(tmp_path).time_step_limit) == (0.0, float("inf"))


def kinds(description: ModelDescription, kind: GroupKind) -> list[int]:
    return [layer.index for layer in description.layers if layer.kind is kind]


IN_TEXT = {
    "llava": 4096,
    "llava_next": 4096,
    "llava_onevision": 4096,
    "paligemma": 2048,
    "gemma3": 2304,
    "internvl": 4096,
    "qwen2_vl": 8192,
    "qwen2_5_vl": 8192,
    "idefics2": 4096,
    "idefics3": 4096,
    "smolvlm": 4096,
    "mistral3": 5120,
    "llama4": 5120,
    "qwen2_audio": 4096,
}
"""Model types whose encoder's output takes the place of tokens, and their hidden size."""


@pytest.mark.parametrize(("model_type", "hidden"), sorted(IN_TEXT.items()))
def test_embeddings_are_one_vector_of_the_texts_hidden_size(model_type: str, hidden: int) -> None:
    description = described(model_type)
    layer = description.layers[-1]
    assert (layer.kind, layer.kv_heads, layer.tensors) == (GroupKind.VISION, 1, 1)
    assert (layer.head_size, layer.token_bytes) == (hidden, hidden * 2)
    assert layer.index == len(description.layers) - 1
    assert description.images_in_text


def test_embeddings_come_after_layers_that_store_nothing() -> None:
    """Gemma 3n: 20 layers store, 15 share, so embeddings are layer 35."""
    assert described("gemma3n").layers[-1].index == 35


def test_encoders_that_feed_several_layers_store_several_vectors() -> None:
    """Qwen 3 VL adds features to three layers beside the embedding."""
    layer = described("qwen3_vl").layers[-1]
    assert layer.token_bytes == 4 * 4096 * 2


def test_embeddings_are_not_quantised() -> None:
    config = config_from_dict({"model_type": "llava"})
    text, embedding = describe(config, 1, kv_scale_bytes=4).layers[-2:]
    assert (text.element_bytes, text.scale_bytes) == (1, 4)
    assert embedding.token_bytes == 4096 * 2


def test_a_text_alone_has_no_embeddings() -> None:
    assert kinds(described("gemma3_text"), GroupKind.VISION) == []
    assert kinds(described("qwen2"), GroupKind.VISION) == []


@pytest.mark.parametrize(
    ("model_type", "layers", "token_bytes"),
    [
        ("whisper", 4, 2 * 6 * 64 * 2),
        ("bart", 12, 2 * 16 * 64 * 2),
        ("t5", 6, 2 * 8 * 64 * 2),
        ("t5gemma", 26, 2 * 4 * 256 * 2),
    ],
)
def test_decoders_attend_to_themselves_and_to_their_encoder(
    model_type: str, layers: int, token_bytes: int
) -> None:
    description = described(model_type)
    assert kinds(description, GroupKind.CROSS) == list(range(layers))
    assert len(description.layers) == 2 * layers
    assert {layer.token_bytes for layer in description.layers} == {token_bytes}
    assert not description.images_in_text


def test_the_decoders_sizes_count_not_the_encoders() -> None:
    description = described("bart", encoder_layers=3, decoder_layers=2, decoder_attention_heads=8)
    assert (len(description.layers), description.query_heads) == (4, 8)
    t5 = described("t5", num_layers=2, num_decoder_layers=5)
    assert kinds(t5, GroupKind.FULL) == list(range(5))


def test_cross_attention_may_have_heads_of_its_own() -> None:
    """Dia: 4 KV heads for the text, 16 of 128 for its encoder."""
    description = described("dia")
    sizes = {str(layer.kind): layer.token_bytes for layer in description.layers}
    assert sizes == {"full": 2 * 4 * 128 * 2, "cross": 2 * 16 * 128 * 2}


def test_cross_attention_in_every_second_layer() -> None:
    description = described("idefics", cross_layer_interval=2)
    assert kinds(description, GroupKind.CROSS) == list(range(0, 32, 2))
    assert not description.images_in_text


def test_a_flag_about_the_prompt_does_not_make_a_decoder_bidirectional() -> None:
    """PaliGemma reads its prompt in both directions, and stores what it read."""
    assert len(kinds(described("paligemma"), GroupKind.FULL)) == 18
