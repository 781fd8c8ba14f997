"""Estimate of a step's operations and bytes, from a model's config: dense and expert layers.

For the analytic profile: every step reads all experts, as large batches do, and all states; image
encoders and attention to image tokens are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvell.cost.analytic import LayerCost, ModelCost
from kvell.memory import GroupKind, LayerSpec, policy_of
from kvell.models.config.description import ModelDescription, text_config
from kvell.models.config.layer_kinds import LAYER_KINDS, layer_types
from kvell.pages.grouping import group_of

RECURRENT_SQUARES = 6
"""Weights of a recurrent layer in squares of the hidden size: Mamba with an expansion of two."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def model_cost(config: Any, description: ModelDescription, element_bytes: int) -> ModelCost:
    text = text_config(config)
    hidden = description.hidden_size
    query_size, kv_size = _attention_sizes(description)
    shape = _shape(text, layer_types(text, description.architecture))
    mixers = 2 * hidden * (query_size + kv_size) * shape.attention
    mixers += RECURRENT_SQUARES * hidden**2 * shape.recurrent
    experts = _first(text, EXPERTS, 1)
    inner = _first(text, ("intermediate_size",), 4 * hidden)
    dense = 3 * hidden * inner
    expert = 3 * hidden * _first(text, ("moe_intermediate_size",), inner)
    per_token = _first(text, ("num_experts_per_tok",), 1)
    always = description.vocab_size * hidden + mixers + shape.dense * dense
    return ModelCost(
        active_weights=always + shape.sparse * per_token * expert,
        weight_bytes=element_bytes * (always + shape.sparse * experts * expert),
        query_size=query_size,
        layers=layer_costs(description.layers),
    )


def layer_costs(layers: Sequence[LayerSpec]) -> tuple[LayerCost, ...]:
    """Return costs of layers that read alike, grouped; layers that read only images are free."""
    alike: dict[tuple[GroupKind, int], list[LayerSpec]] = {}
    for layer in layers:
        if layer.kv_of is None and (layer.kind is GroupKind.STATE or layer.kind.counts_tokens):
            alike.setdefault((layer.kind, layer.window_tokens), []).append(layer)
    return tuple(
        LayerCost(
            None if kind is GroupKind.STATE else policy_of(group_of(members, 1)),
            len(members),
            sum(layer.token_bytes for layer in members),
        )
        for (kind, _), members in alike.items()
    )


@dataclass(frozen=True)
class _Shape:
    """Number of layers with attention, with a recurrence, with a dense MLP, and with experts."""

    attention: int
    recurrent: int
    dense: int
    sparse: int


def _shape(text: Any, types: Sequence[str]) -> _Shape:
    kinds = [kind for layer_type in types for kind in LAYER_KINDS[layer_type]]
    recurrent = kinds.count(GroupKind.STATE)
    sparse = _sparse_layers(text, types)
    if {"mlp", "moe"} & set(types):  # MLPs are layers of their own
        mlps = types.count("mlp") + types.count("moe")
    else:  # in models with hybrid layers, only those have an MLP
        mlps = types.count("hybrid") or len(types)
    return _Shape(len(kinds) - recurrent, recurrent, mlps - sparse, sparse)


def _sparse_layers(text: Any, types: Sequence[str]) -> int:
    if {"mlp", "moe"} & set(types):
        return types.count("moe")
    if _first(text, EXPERTS, 1) == 1:
        return 0
    period = _first(text, ("expert_layer_period",), 1)
    after = _first(text, ("first_k_dense_replace",), 0)
    return (len(types) - after) // period


def _attention_sizes(description: ModelDescription) -> tuple[int, int]:
    """Return the sizes of a query and of stored keys; the hidden size if there are no heads."""
    attending = (x for x in description.layers if x.kind not in (GroupKind.STATE, GroupKind.VISION))
    first = next(attending, None)
    if first is None:
        return description.hidden_size, description.hidden_size
    return description.query_heads * first.head_size, first.kv_heads * first.head_size


def _first(text: Any, names: Sequence[str], default: int) -> int:
    values = (getattr(text, name, None) for name in names)
    value = next((value for value in values if value), default)
    return int(value[0] if isinstance(value, list) else value)
