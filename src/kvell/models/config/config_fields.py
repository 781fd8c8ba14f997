"""Sizes in transformers configs, under the names that each family uses."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvell.errors import ChangeSomething

Rope = Mapping[str, Any]
"""Parameters of a rotation."""
POSITIONS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_text_positions",
    "max_seq_len",
    "context_length",
)
"""Fields that give the context length a model was made for."""
BOUNDLESS_TOKENS = 1 << 20
"""Context length if nothing bounds it: states and relative positions have no last token."""
RELATIVE = ("relative_attention_num_buckets", "position_bias_num_buckets", "slow_but_exact")
"""Fields of models with relative positions: T5's and CPM-Ant's buckets, BLOOM's slopes."""
STRETCHING = ("linear", "yarn")
"""Rotations that make a context longer by a factor, in each token's own position."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")


def text_config(config: Any) -> Any:
    nested = getattr(config, "get_text_config", None)
    return nested(decoder=True) if callable(nested) else getattr(config, "text_config", config)


def architecture(config: Any) -> str:
    """Return the class name that a config gives; its model type if it gives none."""
    names: Sequence[str] | None = getattr(config, "architectures", None)
    return names[0] if names else str(getattr(config, "model_type", "unknown"))


def first_size(text: Any, fields: Sequence[str], name: str) -> int:
    """Return the value of the first field that is set.

    :raises ChangeSomething: if none is set; names the first.
    """
    size = optional_size(text, fields)
    if not size:
        raise ChangeSomething(
            "model", name, f"its config sets no {fields[0]}", "use a config.json that has it"
        )
    return size


def optional_size(text: Any, fields: Sequence[str]) -> int:
    values = (getattr(text, field, None) for field in fields)
    return int(next((value for value in values if value), 0))


def layer_count(text: Any, name: str) -> int:
    decoder = optional_size(text, ("num_decoder_layers",))
    return decoder or first_size(text, ("num_hidden_layers",), name)


def head_size(text: Any, name: str) -> int:
    """Return the numbers in a head's key; hidden size ÷ heads if the config does not say."""
    size = optional_size(text, ("head_dim",))
    return size or first_size(text, ("hidden_size",), name) // first_size(
        text, ("num_attention_heads",), name
    )


def kv_heads(text: Any, name: str) -> int:
    nested = getattr(text, "attn_config", None)
    nested_heads = optional_size(nested, ("kv_n_heads",))
    if nested_heads:  # MPT nests the sizes of attention
        return nested_heads
    # Falcon: one head for all queries, except in its new architecture, which counts them.
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return first_size(text, KV_HEADS, name)


def max_model_len(text: Any, types: Sequence[str], name: str) -> int:
    """Return the model's context length; ``BOUNDLESS_TOKENS`` if nothing bounds it.

    A factor of linear or YaRN scaling counts. A factor of dynamic scaling does not: beyond the
    original length its rotation changes with every token, and so would all cached keys.

    :raises ChangeSomething: if attention has positions and the config does not say how many.
    """
    size = optional_size(text, POSITIONS)
    if size < 0 or (not size and _is_boundless(text, types)):  # XLNet's -1 means no limit
        return BOUNDLESS_TOKENS
    size = size or first_size(text, POSITIONS, name)
    return max([size, *(_stretched(rope, size) for rope in _plain_ropes(text))])


def short_rope_tokens(text: object, name: str) -> int:
    """Return the length of the longest text under the short rotation table; 0 with one table.

    :raises ChangeSomething: if layers change their tables at different lengths.
    """
    lengths = {
        int(rope["original_max_position_embeddings"])
        for rope in _ropes(text)
        if rope.get("rope_type") == "longrope"
    }
    if len(lengths) > 1:
        problem = f"its layers change their rotation at different lengths: {sorted(lengths)}"
        raise ChangeSomething("model", name, problem, "use a model with one such length")
    return max(lengths, default=0)


def _ropes(text: object) -> list[Rope]:
    ropes = getattr(text, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
    return nested or [ropes]


def _plain_ropes(text: object) -> list[Rope]:
    """Return the parameters of the rotation of all layers; none if layer types have their own.

    The config then counts the factor in already: Gemma 3 scales only some layers.
    """
    ropes = getattr(text, "rope_parameters", None) or {}
    return [rope for rope in _ropes(text) if rope is ropes]


def _stretched(rope: Rope, size: int) -> int:
    """Return the length to which a rotation stretches ``size`` tokens; 0 if it does not.

    Model cards advise to add these two kinds and leave ``max_position_embeddings`` unchanged.
    """
    if rope.get("rope_type") not in STRETCHING:
        return 0
    original = rope.get("original_max_position_embeddings") or size
    return int(original * float(rope.get("factor") or 1.0))


def _is_boundless(text: Any, types: Sequence[str]) -> bool:
    grows = any(kind in ("full_attention", "indexed_attention", "hybrid") for kind in types)
    return not grows or any(hasattr(text, field) for field in RELATIVE)
