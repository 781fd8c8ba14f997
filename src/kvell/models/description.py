"""What a model stores and computes, read from its transformers config alone.

No weights are touched and torch is not imported here, so planning works for
models that this machine could never load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, LayerSpec

LAYER_KINDS = {"full_attention": GroupKind.FULL, "sliding_attention": GroupKind.SLIDING}
"""transformers' names of the layer types that can be served."""


@dataclass(frozen=True)
class ModelDescription:
    """What every other room needs to know of a model.

    :param architecture: the transformers class that runs it, such as ``LlamaForCausalLM``.
    :param layers: what each attention layer stores, in order.
    :param query_heads: attention heads per layer (a multiple of every layer's kv_heads).
    :param max_model_len: tokens of prompt and output together that the model was made for.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    max_model_len: int


def describe(config: Any, kv_element_bytes: int) -> ModelDescription:
    """Describe a transformers config object; every layer stores elements of the given size.

    :raises ChangeSomething: if a layer is neither full nor sliding attention, or if the
        config lacks a size that attention needs.
    """
    text = text_config(config)
    name = architecture(config)
    _require_causal(text, name)
    head_size = _head_size(text, name)
    kv_heads = int(_first(text, ("num_key_value_heads", "num_attention_heads"), name))
    windows = tuple(_window(text, kind, name) for kind in layer_types(text, name))
    return ModelDescription(
        architecture=name,
        layers=tuple(
            _layer(index, kv_heads, head_size, kv_element_bytes, window)
            for index, window in enumerate(windows)
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


def _require_causal(text: Any, name: str) -> None:
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        raise ChangeSomething(
            "model", name, "its attention is bidirectional", "use a model that generates text"
        )


def _uses_window(text: Any) -> bool:
    return bool(getattr(text, "sliding_window", None)) and bool(
        getattr(text, "use_sliding_window", True)
    )


def _window(text: Any, layer_type: str, name: str) -> int:
    """Window of a layer in tokens, 0 for full attention."""
    kind = LAYER_KINDS.get(layer_type)
    if kind is None:
        raise ChangeSomething(
            "model",
            name,
            f"has layers of type {layer_type!r}, which cannot be served yet",
            "use a model with full and sliding attention only",
        )
    if kind is GroupKind.FULL:
        return 0
    return int(_first(text, ("sliding_window",), name))


def _layer(
    index: int, kv_heads: int, head_size: int, element_bytes: int, window_tokens: int
) -> LayerSpec:
    kind = GroupKind.SLIDING if window_tokens else GroupKind.FULL
    return LayerSpec(index, kind, kv_heads, head_size, element_bytes, window_tokens)


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
