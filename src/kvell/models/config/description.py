"""A model's storage and computation, read from its transformers config alone.

No weights are touched and torch is not imported here, so planning works for models that this
machine could never load.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import (
    architecture,
    first_size,
    head_size,
    kv_heads,
    max_model_len,
    optional_size,
    short_rope_tokens,
    text_config,
)
from kvell.models.config.json_files import MALFORMED, REPAIR_CONFIG, read_by_library
from kvell.models.config.layer_kinds import LAYER_KINDS, kv_sources, layer_types
from kvell.models.config.multimodal import cross_layers, embedding_layers, images_in_text
from kvell.models.config.state_sizes import state_bytes
from kvell.pages.layout import GroupKind, LayerSpec

__all__ = ["ModelDescription", "architecture", "describe", "text_config"]

MOST_LAYER_BYTES = 1 << 32
WINDOW_FIELDS = {
    GroupKind.SLIDING: ("sliding_window",),
    GroupKind.CHUNKED: ("attention_chunk_size",),
}
"""Config fields that give the window of a layer kind."""


@dataclass(frozen=True)
class ModelDescription:
    """The facts about a model for the rest of Kvell.

    :param architecture: the transformers class that runs it, such as ``LlamaForCausalLM``.
    :param layers: storage of each layer, in order (none, if it reads another layer's keys and
        values). A layer with attention and a state, or with attention to the text and to an
        encoder, appears twice; one with only weights does not appear. The embeddings of image
        tokens are last, after the text's layers.
    :param query_heads: attention heads per layer (a multiple of every layer's kv_heads); 0 without
        attention.
    :param max_model_len: tokens of prompt and output together that the model was made for.
    :param short_rope_tokens: the longest text whose keys use the short one of two rotation tables
        (LongRoPE); 0: there is one table.
    :param images_in_text: whether image tokens are tokens of the text (LLaVA). If not, an image has
        one placeholder in the text and its tokens are on the image axis only (Llama 3.2 Vision), or
        it has no placeholder (an encoder's); meaningless without images.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    images_in_text: bool = True
    short_rope_tokens: int = 0


def describe(
    config: Any,
    kv_element_bytes: int,
    kv_scale_bytes: int = 0,
    state_element_bytes: int | None = None,
) -> ModelDescription:
    """Describe a transformers config object; every layer stores elements of the given size.

    Quantised elements have a scale of ``kv_scale_bytes`` for each head's key and value. States and
    embeddings are not quantised: their elements have ``state_element_bytes``, the size of the
    model's own dtype, by default ``kv_element_bytes``.

    A described model can be planned; ``families`` decides whether it can be run.

    :raises ChangeSomething: if a layer's memory is of no known kind, if attention is bidirectional,
        if tokens store more than keys and values, or if the config lacks a size that attention
        needs.
    """
    name = architecture(config)
    with read_by_library(name, MALFORMED, REPAIR_CONFIG):
        return _described(
            config, kv_element_bytes, kv_scale_bytes, state_element_bytes or kv_element_bytes, name
        )


def _described(
    config: Any, kv_element_bytes: int, kv_scale_bytes: int, state_element_bytes: int, name: str
) -> ModelDescription:
    text = text_config(config)
    _require_causal(config, text, name)
    types = layer_types(text, name)
    _require_plain_index(text, types, name)
    sources = kv_sources(text, types)
    specs = [
        *_text_layers(text, types, kv_element_bytes, state_element_bytes, name),
        *cross_layers(config, text, kv_element_bytes, name),
    ]
    _require_sizes(specs, name)
    scaled = (
        layer if layer.state_bytes else replace(layer, scale_bytes=kv_scale_bytes)
        for layer in sorted(specs, key=lambda layer: layer.index)
    )
    return ModelDescription(
        architecture=name,
        layers=(
            *(_sharing(layer, sources) for layer in scaled),
            *embedding_layers(config, text, state_element_bytes, name),
        ),
        query_heads=_query_heads(text, specs, name),
        hidden_size=first_size(text, ("hidden_size",), name),
        vocab_size=first_size(text, ("vocab_size",), name),
        max_model_len=max_model_len(text, types, name),
        short_rope_tokens=short_rope_tokens(text, name),
        images_in_text=images_in_text(config, text),
    )


def _require_sizes(layers: list[LayerSpec], name: str) -> None:
    """Refuse layers that store nothing, or more bytes than sizes of pages are searched for.

    :raises ChangeSomething: naming the layer and its bytes.
    """
    for layer in layers:
        if not 0 < layer.token_bytes <= MOST_LAYER_BYTES or layer.window_tokens < 0:
            what = "the state" if layer.state_bytes else "a token"
            problem = f"{what} of its layer {layer.index} has {layer.token_bytes} bytes"
            raise ChangeSomething("model", name, problem, REPAIR_CONFIG)


def _sharing(layer: LayerSpec, sources: Mapping[int, int]) -> LayerSpec:
    """Set ``kv_of`` to the layer whose keys and values it reads; a state is never shared."""
    return layer if layer.state_bytes else replace(layer, kv_of=sources.get(layer.index))


def _text_layers(
    text: Any, types: tuple[str, ...], element_bytes: int, state_element_bytes: int, name: str
) -> Iterator[LayerSpec]:
    for index, layer_type in enumerate(types):
        for kind in LAYER_KINDS[layer_type]:
            if kind is GroupKind.STATE:
                size_bytes = state_bytes(text, state_element_bytes, name)
                yield LayerSpec(index, kind, 0, 0, state_element_bytes, state_bytes=size_bytes)
            else:
                yield _attention(text, index, kind, element_bytes, name)


def _attention(text: Any, index: int, kind: GroupKind, element_bytes: int, name: str) -> LayerSpec:
    """Return a layer's storage: a latent with its rope part (MLA), or K and V of every head."""
    own = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
    window_tokens = _window(own, kind, name)
    latent_size = optional_size(own, ("kv_lora_rank",))
    if latent_size:
        # Sparse attention chooses tokens by a further vector, stored next to the latent.
        size = latent_size + sum(
            optional_size(own, (field,)) for field in ("qk_rope_head_dim", "index_head_dim")
        )
        return LayerSpec(index, kind, 1, size, element_bytes, window_tokens, tensors=1)
    heads = kv_heads(own, name)
    size = head_size(own, name)
    value_size = optional_size(own, ("v_head_dim",)) or size
    if value_size != size:  # a key and a value of different sizes are stored as one vector
        size += value_size
        return LayerSpec(index, kind, heads, size, element_bytes, window_tokens, tensors=1)
    return LayerSpec(index, kind, heads, size, element_bytes, window_tokens)


def _window(text: Any, kind: GroupKind, name: str) -> int:
    fields = WINDOW_FIELDS.get(kind)
    return first_size(text, fields, name) if fields else 0


def _query_heads(text: Any, layers: list[LayerSpec], name: str) -> int:
    attends = any(layer.kind is not GroupKind.STATE for layer in layers)
    return first_size(text, ("num_attention_heads",), name) if attends else 0


def _require_plain_index(text: Any, types: tuple[str, ...], name: str) -> None:
    """Refuse a sparse-attention index, unless it is one vector per token next to a latent."""
    has_index = optional_size(text, ("index_head_dim",)) or "indexed_attention" in types
    beside_latent = optional_size(text, ("index_head_dim",)) and optional_size(
        text, ("kv_lora_rank",)
    )
    if has_index and (not beside_latent or optional_size(text, ("index_kpool",))):
        raise ChangeSomething(
            "model",
            name,
            "its sparse attention stores an index beside keys and values",
            "use a model with full, sliding or chunked attention only",
        )


def _require_causal(config: Any, text: Any, name: str) -> None:
    """Refuse a text-only model with bidirectional attention: it keeps nothing between steps.

    With an encoder the flag concerns only the prompt or the image (PaliGemma, Gemma 4):
    generated tokens still store keys and values.
    """
    bidirectional = config is text and getattr(text, "use_bidirectional_attention", None)
    if (bidirectional and bidirectional != "vision") or not getattr(text, "is_causal", True):
        raise ChangeSomething(
            "model", name, "its attention is bidirectional", "use a model that generates text"
        )
