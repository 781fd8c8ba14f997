"""The memory that images, audio and encoders add to a model, from its config alone.

There are three ways: the encoder's embeddings replace tokens of the text (LLaVA and most others),
separate layers attend to the image's keys and values (Llama 3.2 Vision), or every decoder layer
attends to the encoder's tokens (Whisper, T5).
"""

from collections.abc import Iterator
from typing import Any

from kvell.models.config.config_fields import (
    first_size,
    head_size,
    kv_heads,
    layer_count,
    optional_size,
)
from kvell.pages.layout import GroupKind, LayerSpec

ENCODERS = ("vision_config", "audio_config")
LEAST_EMBEDDING_BYTES = 2
"""Embeddings are activations: they stay in 16 bits if keys and values are quantised."""

MOST_GRID_TOKENS = 4096
"""Most tokens of an image of free size; memory is reserved to encode one such image."""


def is_encoder_decoder(config: Any, text: Any) -> bool:
    """Return whether every layer of the decoder attends to an encoder's tokens."""
    flags = ("is_encoder_decoder", "add_cross_attention")
    return any(getattr(part, flag, False) for part in (config, text) for flag in flags)


def images_in_text(config: Any, text: Any) -> bool:
    """Return whether image tokens are tokens of the text; else it has at most one placeholder."""
    return not (
        is_encoder_decoder(config, text)
        or getattr(text, "cross_attention_layers", None)
        or getattr(text, "cross_layer_interval", None)
    )


def cross_layers(config: Any, text: Any, element_bytes: int, name: str) -> Iterator[LayerSpec]:
    """Yield the cross-attention that layers have besides their attention to the text.

    All layers of an encoder-decoder have it, and every ``cross_layer_interval``-th of others
    (Idefics).  Layers with cross-attention alone are given by the layer types instead.
    """
    step = optional_size(text, ("cross_layer_interval",)) or int(is_encoder_decoder(config, text))
    if not step:
        return
    heads = optional_size(text, ("cross_num_key_value_heads",)) or kv_heads(text, name)
    size = optional_size(text, ("cross_head_dim",)) or head_size(text, name)
    for index in range(0, layer_count(text, name), step):
        yield LayerSpec(index, GroupKind.CROSS, heads, size, element_bytes)


def embedding_layers(
    config: Any, text: Any, element_bytes: int, name: str
) -> tuple[LayerSpec, ...]:
    """Return the embeddings of image tokens that wait for prefill, as one layer after the text's.

    () if the model has no encoder whose output becomes text tokens. Encoders that also feed inner
    layers (Qwen 3 VL) store one more vector for each of these.
    """
    encoders = [getattr(config, field, None) for field in ENCODERS]
    if config is text or not any(encoders) or not images_in_text(config, text):
        return ()
    extra = max(len(getattr(e, "deepstack_visual_indexes", None) or ()) for e in encoders)
    spec = LayerSpec(
        layer_count(text, name),
        GroupKind.VISION,
        kv_heads=1 + extra,
        head_size=first_size(text, ("hidden_size",), name),
        element_bytes=max(element_bytes, LEAST_EMBEDDING_BYTES),
        tensors=1,
    )
    return (spec,)
