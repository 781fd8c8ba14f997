"""What images, audio and encoders add to a model's memory, from its config alone.

Three ways: the encoder's embeddings take the place of tokens in the text (LLaVA and most
others), layers of their own attend to the image's keys and values (Llama 3.2 Vision), or
every decoder layer attends to the encoder's tokens (Whisper, T5).
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
"""Embeddings are activations: they stay in 16 bits where keys and values are quantised."""

MOST_GRID_TOKENS = 4096
"""Of one image, where images may have any size: memory is kept for encoding one of these."""


def is_encoder_decoder(config: Any, text: Any) -> bool:
    """Does every layer of the decoder attend to an encoder's tokens?"""
    flags = ("is_encoder_decoder", "add_cross_attention")
    return any(getattr(part, flag, False) for part in (config, text) for flag in flags)


def images_in_text(config: Any, text: Any) -> bool:
    """Are image tokens tokens of the text? Else the text has a placeholder, or no trace."""
    return not (
        is_encoder_decoder(config, text)
        or getattr(text, "cross_attention_layers", None)
        or getattr(text, "cross_layer_interval", None)
    )


def cross_layers(config: Any, text: Any, element_bytes: int, name: str) -> Iterator[LayerSpec]:
    """Attention to an encoder that stands beside a layer's attention to the text.

    In all layers of an encoder-decoder, in every ``cross_layer_interval``-th of others
    (Idefics).  Layers that have no other attention are among the layer types.
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
    """The embeddings of image tokens that wait for prefill, as one layer after the text's.

    None if the model has no encoder whose output goes into the text.  Encoders that give
    one embedding for several layers (Qwen 3 VL) store that many vectors.
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
