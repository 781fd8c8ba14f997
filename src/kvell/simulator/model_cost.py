"""What a model's step computes and reads, estimated from its config: dense and expert layers.

An estimate for the analytic profile: state layers count as attention layers do,
and all experts are read in every step, as large batches do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvell.engine.plan import TokenWork
from kvell.memory import Layout, policy_of
from kvell.models.description import ModelDescription, text_config
from kvell.simulator.profiles import StepCost

FLOPS_PER_WEIGHT = 2
FLOPS_PER_PAIR = 4
"""Scores and weighted values: a multiplication and an addition each, per number of a head."""


@dataclass(frozen=True)
class ModelCost:
    """Work of one model.

    :param active_weights: numbers that one token is multiplied with.
    :param weight_bytes: bytes of weights that a step reads.
    :param query_size: query heads times head size: numbers that attend, per layer and token.
    """

    active_weights: int
    weight_bytes: int
    query_size: int

    def of_step(self, layout: Layout, work: Sequence[TokenWork]) -> StepCost:
        """The cost of computing ``work`` over pages of ``layout``."""
        tokens = sum(one.count for one in work)
        flops = float(FLOPS_PER_WEIGHT * self.active_weights * tokens)
        read_bytes = float(self.weight_bytes)
        for group in layout.groups:
            live = policy_of(group).live_tokens
            pairs = sum(one.count * (1 + live(one.start + one.count // 2)) for one in work)
            flops += FLOPS_PER_PAIR * self.query_size * len(group.layers) * pairs
            read_bytes += group.token_bytes * sum(live(one.start + one.count) for one in work)
        return StepCost(flops, read_bytes)


def model_cost(config: Any, description: ModelDescription, element_bytes: int) -> ModelCost:
    """Estimate a transformers config's weights."""
    text = text_config(config)
    hidden, layers = description.hidden_size, int(text.num_hidden_layers)
    head_size = description.layers[0].head_size
    query_size = description.query_heads * head_size
    kv_size = description.layers[0].kv_heads * head_size
    attention = 2 * hidden * (query_size + kv_size)
    experts = _first(text, ("num_local_experts", "num_experts", "n_routed_experts"), 1)
    per_token = _first(text, ("num_experts_per_tok",), 1) if experts > 1 else 1
    inner = _first(text, ("intermediate_size",), 4 * hidden)
    if experts > 1:
        inner = _first(text, ("moe_intermediate_size",), inner)
    expert = 3 * hidden * inner
    head = description.vocab_size * hidden
    return ModelCost(
        active_weights=head + layers * (attention + per_token * expert),
        weight_bytes=element_bytes * (head + layers * (attention + experts * expert)),
        query_size=query_size,
    )


def _first(text: Any, names: Sequence[str], default: int) -> int:
    """The first of a config's fields that is set."""
    values = (getattr(text, name, None) for name in names)
    return int(next((value for value in values if value), default))
