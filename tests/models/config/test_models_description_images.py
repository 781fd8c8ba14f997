"""What encoders add: embeddings in the text, cross-attention, an encoder's tokens."""

from typing import Any

import pytest

from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import ModelDescription, describe
from kvell.pages.layout import GroupKind


def described(model_type: str, **fields: Any) -> ModelDescription:
    return describe(config_from_dict({"model_type": model_type} | fields), 2)


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
