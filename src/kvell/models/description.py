"""What a model stores and computes, read from its transformers config alone.

No weights are touched and torch is not imported here, so planning works for
models that this machine could never load.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, LayerSpec

LAYER_KINDS = {
    "full_attention": GroupKind.FULL,
    "sliding_attention": GroupKind.SLIDING,
    "chunked_attention": GroupKind.CHUNKED,
}
"""transformers' names of the layer types whose memory can be planned."""

WINDOW_FIELDS = {
    GroupKind.SLIDING: ("sliding_window",),
    GroupKind.CHUNKED: ("attention_chunk_size",),
}
"""Where a config says how far the layers of a kind read."""


@dataclass(frozen=True)
class ModelDescription:
    """What every other room needs to know of a model.

    :param architecture: the transformers class that runs it, such as ``LlamaForCausalLM``.
    :param layers: what each attention layer stores, in order (nothing, where it reads
        another layer's keys and values).
    :param query_heads: attention heads per layer (a multiple of every layer's kv_heads).
    :param max_model_len: tokens of prompt and output together that the model was made for.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    max_model_len: int


def describe(config: Any, kv_element_bytes: int, kv_scale_bytes: int = 0) -> ModelDescription:
    """Describe a transformers config object; every layer stores elements of the given size.

    Quantised elements have a scale of ``kv_scale_bytes`` for each head's key and value.

    What is described can be planned; what can be run, ``families`` says.

    :raises ChangeSomething: if a layer is of no kind in ``LAYER_KINDS``, if tokens store
        more than keys and values, or if the config lacks a size that attention needs.
    """
    text = text_config(config)
    name = architecture(config)
    _require_causal(text, name)
    _require_no_indexer(text, name)
    types = layer_types(text, name)
    layers = (
        _layer(text, i, _kind(kind, name), kv_element_bytes, name) for i, kind in enumerate(types)
    )
    sources = kv_sources(text, types)
    return ModelDescription(
        architecture=name,
        layers=tuple(
            replace(layer, scale_bytes=kv_scale_bytes, kv_of=sources.get(layer.index))
            for layer in layers
        ),
        query_heads=int(_first(text, ("num_attention_heads",), name)),
        hidden_size=int(_first(text, ("hidden_size",), name)),
        vocab_size=int(_first(text, ("vocab_size",), name)),
        max_model_len=int(_first(text, ("max_position_embeddings",), name)),
    )


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model (itself, unless nested)."""
    nested = getattr(config, "get_text_config", None)
    return nested(decoder=True) if callable(nested) else getattr(config, "text_config", config)


def architecture(config: Any) -> str:
    """The class name a config asks for; its model type where it names none."""
    names: Sequence[str] | None = getattr(config, "architectures", None)
    return names[0] if names else str(getattr(config, "model_type", "unknown"))


def layer_types(text: Any, name: str) -> tuple[str, ...]:
    """One of transformers' layer type names per layer.

    Configs without ``layer_types`` say it by ``sliding_window`` and, in older
    files, ``sliding_window_pattern`` (every n-th layer is full).
    """
    count = int(_first(text, ("num_hidden_layers",), name))
    named = getattr(text, "layer_types", None)
    if named:
        return tuple(named[:count])
    if not _uses_window(text):
        return ("full_attention",) * count
    pattern = getattr(text, "sliding_window_pattern", None)
    if not pattern:
        return ("sliding_attention",) * count
    return tuple(
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(count)
    )


def kv_sources(text: Any, types: Sequence[str]) -> dict[int, int]:
    """Layers that read an earlier one's keys and values, and which one.

    The last ``num_kv_shared_layers`` do (Gemma 3n): each reads the last layer of its own
    type before them.
    """
    first = len(types) - int(getattr(text, "num_kv_shared_layers", None) or 0)
    if first <= 0:
        return {}
    last_of_type = {kind: index for index, kind in enumerate(types[:first])}
    shared = range(first, len(types))
    return {index: last_of_type[types[index]] for index in shared if types[index] in last_of_type}


def _require_no_indexer(text: Any, name: str) -> None:
    if getattr(text, "index_head_dim", None):
        raise ChangeSomething(
            "model",
            name,
            "its sparse attention stores an index beside keys and values",
            "use a model with full, sliding or chunked attention only",
        )


def _require_causal(text: Any, name: str) -> None:
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        raise ChangeSomething(
            "model", name, "its attention is bidirectional", "use a model that generates text"
        )


def _uses_window(text: Any) -> bool:
    return bool(getattr(text, "sliding_window", None)) and bool(
        getattr(text, "use_sliding_window", True)
    )


def _kind(layer_type: str, name: str) -> GroupKind:
    kind = LAYER_KINDS.get(layer_type)
    if kind is None:
        raise ChangeSomething(
            "model",
            name,
            f"has layers of type {layer_type!r}, which cannot be served yet",
            "use a model with full, sliding or chunked attention only",
        )
    return kind


def _layer(text: Any, index: int, kind: GroupKind, element_bytes: int, name: str) -> LayerSpec:
    """What a layer stores: a latent with its rope part (MLA), or K and V of every head."""
    own = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
    window_tokens = _window(own, kind, name)
    latent_size = int(getattr(own, "kv_lora_rank", None) or 0)
    if latent_size:
        size = latent_size + int(getattr(own, "qk_rope_head_dim", None) or 0)
        return LayerSpec(index, kind, 1, size, element_bytes, window_tokens, tensors=1)
    kv_heads = int(_first(own, ("num_key_value_heads", "num_attention_heads"), name))
    return LayerSpec(index, kind, kv_heads, _head_size(own, name), element_bytes, window_tokens)


def _window(text: Any, kind: GroupKind, name: str) -> int:
    """How far a layer of the kind reads, in tokens; 0 for full attention."""
    fields = WINDOW_FIELDS.get(kind)
    return int(_first(text, fields, name)) if fields else 0


def _head_size(text: Any, name: str) -> int:
    size = getattr(text, "head_dim", None)
    if size:
        return int(size)
    hidden = int(_first(text, ("hidden_size",), name))
    return hidden // int(_first(text, ("num_attention_heads",), name))


def _first(text: Any, fields: tuple[str, ...], name: str) -> Any:
    """The first of the fields that is set."""
    for field in fields:
        value = getattr(text, field, None)
        if value:
            return value
    raise ChangeSomething(
        "model", name, f"its config sets no {fields[0]}", "use a config.json that has it"
    )
