"""Activation bytes of a step of a fused forward pass, from a config alone.

Counted at the widest point of a layer, as a serving engine's profile run measures it: the next
layer reuses the buffers, so layers do not add up.  Elements have the size of the run; logits are
also kept in float32.
"""

from typing import Any

from kvell.elastic.arena import ActivationModel
from kvell.models.config.description import ModelDescription, text_config
from kvell.vocabulary import MIB

FIXED_BYTES = 64 * MIB
"""Workspaces of the libraries."""
RESIDUAL_COPIES = 2
"""The residual stream, and the copy that a layer reads."""
GATED_COPIES = 3
"""The gate and up projections, and their product."""
RECURRENT_COPIES = 6
"""Copies of a recurrent layer's inner size, which is twice the hidden size: input, gate, convolved
input, step sizes, and the scan's output in float32 (Mamba's five projections)."""
EXPANSION = 2
LOGIT_BYTES = 4


def activation_model(
    config: Any, description: ModelDescription, element_bytes: int
) -> ActivationModel:
    """Return the model of a step's bytes: fixed, per token, and per row of logits."""
    text = text_config(config)
    hidden = description.hidden_size
    widest = max(_attention(description), _mlp(text, hidden), _recurrent(description, text, hidden))
    return ActivationModel(
        FIXED_BYTES,
        element_bytes * (RESIDUAL_COPIES * hidden + widest),
        (element_bytes + LOGIT_BYTES) * description.vocab_size,
    )


def _attention(description: ModelDescription) -> int:
    """Return the elements per token of queries, keys, values and the heads' outputs."""
    sizes = [layer.kv_heads * layer.head_size for layer in description.layers]
    heads = [layer.head_size for layer in description.layers if layer.head_size]
    query_size = description.query_heads * max(heads, default=0)
    return 2 * query_size + 2 * max(sizes, default=0)


def _mlp(text: Any, hidden: int) -> int:
    """Return an MLP's elements per token; each active expert has inner elements and an output."""
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else int(inner)
    if not experts:
        return GATED_COPIES * inner
    expert = int(getattr(text, "moe_intermediate_size", None) or inner)
    return max(GATED_COPIES * inner, experts * (GATED_COPIES * expert + hidden))


def _recurrent(description: ModelDescription, text: Any, hidden: int) -> int:
    if not any(layer.state_bytes for layer in description.layers):
        return 0
    return RECURRENT_COPIES * EXPANSION * hidden
