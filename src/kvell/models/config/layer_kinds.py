"""The kinds of memory of each layer of a model, from its config alone."""

from collections.abc import Sequence
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import layer_count
from kvell.models.config.state_sizes import is_recurrent
from kvell.pages.layout import GroupKind

FULL, SLIDING, STATE = GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE

LAYER_KINDS: dict[str, tuple[GroupKind, ...]] = {
    "full_attention": (FULL,),
    "indexed_attention": (FULL,),
    "sliding_attention": (SLIDING,),
    "chunked_attention": (GroupKind.CHUNKED,),
    "cross_attention": (GroupKind.CROSS,),
    "linear_attention": (STATE,),
    "mamba": (STATE,),
    "conv": (STATE,),
    "recurrent": (STATE,),
    "hybrid": (FULL, STATE),
    "hybrid_sliding": (SLIDING, STATE),
    "mlp": (),
    "moe": (),
}
"""Kinds of memory by transformers' layer type: two for a layer with attention and a recurrence side
by side, none for one that has only weights."""


def layer_types(text: Any, name: str) -> tuple[str, ...]:
    """Return transformers' layer type name of each layer.

    Configs without ``layer_types`` give it as ``layers_block_type`` (older hybrids), as
    ``sliding_window`` and, in older files, ``sliding_window_pattern`` (every n-th layer is
    full).  ``cross_attention_layers`` have no attention to the text itself.

    :raises ChangeSomething: if a type is not in ``LAYER_KINDS``.
    """
    types = _named_types(text, name) or _types_by_window(text, name)
    crossed = frozenset(getattr(text, "cross_attention_layers", None) or ())
    types = tuple("cross_attention" if i in crossed else kind for i, kind in enumerate(types))
    for kind in types:
        _require_known(kind, name)
    return types


def kv_sources(text: Any, types: Sequence[str]) -> dict[int, int]:
    """Map each layer that reads an earlier layer's keys and values to that layer.

    The last ``num_kv_shared_layers`` do (Gemma 3n), each from the last layer of its own type before
    them.
    """
    first = len(types) - int(getattr(text, "num_kv_shared_layers", None) or 0)
    if first <= 0:
        return {}
    last_of_type = {kind: index for index, kind in enumerate(types[:first])}
    shared = range(first, len(types))
    return {index: last_of_type[types[index]] for index in shared if types[index] in last_of_type}


def _named_types(text: Any, name: str) -> tuple[str, ...]:
    named = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    plain = "sliding_attention" if _uses_window(text) else "full_attention"
    types = (plain if kind == "attention" else str(kind) for kind in named)
    return tuple(types)[: layer_count(text, name)]


def _types_by_window(text: Any, name: str) -> tuple[str, ...]:
    count = layer_count(text, name)
    if not hasattr(text, "num_attention_heads") and is_recurrent(text):
        return ("linear_attention",) * count
    if not _uses_window(text):
        return ("full_attention",) * count
    pattern = getattr(text, "sliding_window_pattern", None)
    if not pattern:
        return ("sliding_attention",) * count
    return tuple(
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(count)
    )


def _uses_window(text: Any) -> bool:
    return bool(getattr(text, "sliding_window", None)) and bool(
        getattr(text, "use_sliding_window", True)
    )


def _require_known(kind: str, name: str) -> None:
    if kind in LAYER_KINDS:
        return
    raise ChangeSomething(
        "model",
        name,
        f"has layers of type {kind!r}, whose memory is not known",
        "use a model with attention, state space or linear attention layers",
    )
