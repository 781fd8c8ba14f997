"""Bytes of a dense model's weights, computed from its config without torch."""

from typing import Any

from kvell.models.families.families import FUSED, FusedFamily


def plain_weights_bytes(config: Any, element_bytes: int) -> int | None:
    """Return the bytes of all parameters of a model with a plain config; tied ones count once.

    None stands for another family.

    :param config: a config of :func:`kvell.models.families.plain_config.plain_config`.
    :param element_bytes: bytes of an element.
    """
    types = {family.model_type: family for family in FUSED.values() if not family.mixer}
    family = types.get(config.model_type)
    if family is None:
        return None
    hidden: int = config.hidden_size
    vocab: int = config.vocab_size
    embeddings = vocab * hidden * (1 if config.tie_word_embeddings else 2)
    layers: int = config.num_hidden_layers * _layer_numbers(config, family)
    return (embeddings + layers + hidden) * element_bytes


def _layer_numbers(config: Any, family: FusedFamily) -> int:
    """Return the numbers in the parameters of one layer."""
    hidden: int = config.hidden_size
    inner: int = config.intermediate_size
    queries: int = config.num_attention_heads * config.head_dim
    keys: int = config.num_key_value_heads * config.head_dim
    attention = hidden * (2 * queries + 2 * keys)
    has_bias = bool(family.attention_bias and getattr(config, family.attention_bias))
    if has_bias or family.biased_inputs:
        attention += queries + 2 * keys
    if has_bias:
        attention += hidden
    mlp = 3 * hidden * inner
    if family.mlp_bias and getattr(config, family.mlp_bias):
        mlp += 2 * inner + hidden
    norms = hidden * (4 if family.sandwich else 2)
    head_norms: int = 2 * config.head_dim if family.head_norms else 0
    return attention + mlp + norms + head_norms
