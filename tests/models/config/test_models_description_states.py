"""States of recurrent layers and what encoders add, worked out by hand."""

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


def test_jamba_is_28_states_and_4_attention_layers() -> None:
    """(8192, 3) and (8192, 16) in bf16; attention in every eighth layer from the fifth."""
    description = described("jamba")
    assert one_size(description) == 2 * (8192 * 3 + 8192 * 16) == 311_296
    attention = [layer for layer in description.layers if layer.kind is GroupKind.FULL]
    assert [layer.index for layer in attention] == [4, 12, 20, 28]
    assert {layer.token_bytes for layer in attention} == {2 * 8 * 128 * 2}
    assert [layer.index for layer in description.layers] == list(range(32))


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_mamba_1_without_attention(model_type: str) -> None:
    """1,536 channels, a kernel of 4, 16 numbers of state for each channel."""
    description = described(model_type, hidden_size=768)
    assert one_size(description) == 2 * (1536 * 3 + 1536 * 16)
    assert len(states(description)) == len(description.layers) == 32
    assert description.query_heads == 0


def test_zamba_has_a_state_in_every_layer_and_attention_in_some() -> None:
    """7,424 channels; 16 heads of twice the hidden size over 16 heads: 464."""
    description = described("zamba")
    assert one_size(description) == 2 * (7424 * 3 + 7424 * 16)
    attention = [layer for layer in description.layers if layer.kind is GroupKind.FULL]
    assert (len(states(description)), len(attention)) == (76, 13)
    assert {layer.token_bytes for layer in attention} == {2 * 16 * 464 * 2}


def test_nemotron_h_keeps_its_state_in_float32_and_mlp_layers_store_nothing() -> None:
    """(10240, 3) in bf16 and (128, 64, 128) in float32."""
    description = described("nemotron_h", hybrid_override_pattern="M-M*-M", num_hidden_layers=6)
    assert one_size(description) == 10240 * 3 * 2 + 128 * 64 * 128 * 4 == 4_255_744
    kinds = [(layer.index, str(layer.kind)) for layer in description.layers]
    assert kinds == [(0, "state"), (2, "state"), (3, "full"), (5, "state")]


def test_the_dtype_a_config_asks_for_comes_before_the_models() -> None:
    narrow = described("nemotron_h", mamba_ssm_cache_dtype="bfloat16")
    assert one_size(narrow) == 2 * (10240 * 3 + 128 * 64 * 128)


def test_bamba() -> None:
    """128 heads of 64, one group of 128 numbers of state: 8192 + 2 × 128 channels."""
    description = described("bamba", mamba_d_state=128, attn_layer_indices=[1, 3])
    assert one_size(description) == 2 * ((8192 + 256) * 3 + 8192 * 128)
    attention = [layer.index for layer in description.layers if layer.kind is GroupKind.FULL]
    assert attention == [1, 3]


def test_granite_hybrid() -> None:
    types = ["mamba", "attention", "mamba"]
    description = described("granitemoehybrid", num_hidden_layers=3, layer_types=types)
    assert one_size(description) == 2 * ((8192 + 512) * 3 + 8192 * 256)
    assert [str(layer.kind) for layer in description.layers] == ["state", "full", "state"]


def test_falcon_h1_layers_stand_twice_attention_and_state() -> None:
    """24 heads of 128 and 256 numbers of state, in every one of the layers."""
    description = described(
        "falcon_h1",
        num_hidden_layers=2,
        mamba_d_ssm=3072,
        mamba_n_heads=24,
        mamba_d_head=128,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
    )
    assert one_size(description) == 2 * ((3072 + 512) * 3 + 3072 * 256) == 1_594_368
    kinds = [(layer.index, str(layer.kind)) for layer in description.layers]
    assert kinds == [(0, "full"), (0, "state"), (1, "full"), (1, "state")]
    assert description.layers[0].token_bytes == 2 * 2 * 128 * 2


def test_zamba2() -> None:
    """8 heads of 640, one group of 64; attention of 32 heads of 160 in 9 layers."""
    description = described("zamba2")
    assert one_size(description) == 2 * ((5120 + 128) * 3 + 5120 * 64)
    attention = [layer for layer in description.layers if layer.kind is GroupKind.FULL]
    assert (len(states(description)), len(attention)) == (54, 9)
    assert {layer.token_bytes for layer in attention} == {2 * 32 * 160 * 2}


def test_mamba_2_without_attention() -> None:
    """128 heads of 64, 8 groups of 128."""
    assert one_size(described("mamba2")) == 2 * ((8192 + 2 * 8 * 128) * 3 + 8192 * 128)


def test_qwen3_next_is_three_states_to_one_attention_layer() -> None:
    """(8192, 3) and (32, 128, 128) in bf16."""
    description = described("qwen3_next")
    assert one_size(description) == 2 * (8192 * 3 + 32 * 128 * 128) == 1_097_728
    kinds = [str(layer.kind) for layer in description.layers]
    assert kinds == (["state"] * 3 + ["full"]) * 12
    assert description.layers[3].token_bytes == 2 * 2 * 256 * 2


def test_qwen3_5_text_part_of_a_multimodal_model() -> None:
    description = described("qwen3_5")
    assert one_size(description) == 1_097_728
    assert description.layers[-1].kind is GroupKind.VISION


def test_olmo_hybrid() -> None:
    """30 heads, keys of 96 and values of 192."""
    assert one_size(described("olmo_hybrid")) == 2 * ((2 * 30 * 96 + 30 * 192) * 3 + 30 * 96 * 192)


def test_kimi_linear_keeps_its_state_in_float32_beside_latents() -> None:
    """Three convolutions over 32 heads of 128, a square of 128 for each head."""
    description = described("kimi_linear")
    assert one_size(description) == 3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4
    latents = {layer.token_bytes for layer in description.layers if not layer.state_bytes}
    assert latents == {(512 + 64) * 2}


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
def test_short_convolutions_remember_two_tokens(model_type: str) -> None:
    types = ["conv", "conv", "full_attention"]
    description = described(model_type, hidden_size=2048, num_hidden_layers=3, layer_types=types)
    assert one_size(description) == 2048 * 2 * 2
    assert [str(layer.kind) for layer in description.layers] == ["state", "state", "full"]


def test_lightning_attention() -> None:
    """A square of the head size for each of 32 heads."""
    description = described("minimax")
    assert one_size(description) == 32 * 128 * 128 * 2
    assert len(states(description)) == 16


def test_rg_lru_stands_between_windows() -> None:
    """A window of 3 inputs in bf16, a state in float32; every third layer slides."""
    description = described("recurrent_gemma", attention_window_size=2048)
    assert one_size(description) == 2560 * 3 * 2 + 2560 * 4
    kinds = [str(layer.kind) for layer in description.layers[:6]]
    assert kinds == ["state", "state", "sliding"] * 2
    assert description.layers[2].window_tokens == 2048


def test_rwkv_has_two_inputs_and_three_sums() -> None:
    assert one_size(described("rwkv", hidden_size=512)) == 2 * 512 * 2 + 3 * 512 * 4


def test_xlstm_has_a_matrix_a_normaliser_and_a_stabiliser_for_each_head() -> None:
    """8 heads, keys of 256, values of 512."""
    assert one_size(described("xlstm")) == 8 * (256 * 512 + 256 + 1) * 4


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


def test_llama_vision_attends_to_images_in_layers_of_their_own() -> None:
    """40 layers, 8 of them cross-attention alone; one placeholder for each image."""
    description = described("mllama")
    assert kinds(description, GroupKind.CROSS) == [3, 8, 13, 18, 23, 28, 33, 38]
    assert len(kinds(description, GroupKind.FULL)) == 32
    assert kinds(description, GroupKind.VISION) == []
    assert {layer.token_bytes for layer in description.layers} == {2 * 8 * 128 * 2}
    assert not description.images_in_text


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
