"""What a step of a fused forward pass keeps alive beside weights and KV, from a config alone.

Counted at the widest point of a layer, as a serving engine's profile run measures it: buffers
of one layer are the next one's too, so layers do not add up.  In the element size of the run,
but for logits, which are also kept in float32.
"""

from typing import Any

from kvell.elastic.arena import ActivationModel
from kvell.models.config.description import ModelDescription, text_config
from kvell.vocabulary import MIB

FIXED_BYTES = 64 * MIB
"""Workspaces of the libraries."""
RESIDUAL_COPIES = 2
"""The residual stream, and what a layer reads of it."""
GATED_COPIES = 3
"""Gate, up, and their product."""
RECURRENT_COPIES = 6
"""Of a recurrent layer's inner size, which is twice the hidden one: input, gate, convolved,
step sizes, and the scan's output in float32 (Mamba's five projections)."""
EXPANSION = 2
LOGIT_BYTES = 4


def activation_model(
    config: Any, description: ModelDescription, element_bytes: int
) -> ActivationModel:
    """Bytes of a step by its tokens and rows of logits."""
    text = text_config(config)
    hidden = description.hidden_size
    widest = max(_attention(description), _mlp(text, hidden), _recurrent(description, text, hidden))
    return ActivationModel(
        FIXED_BYTES,
        element_bytes * (RESIDUAL_COPIES * hidden + widest),
        (element_bytes + LOGIT_BYTES) * description.vocab_size,
    )


def _attention(description: ModelDescription) -> int:
    """Queries, keys, values and the heads' outputs."""
    sizes = [layer.kv_heads * layer.head_size for layer in description.layers]
    heads = [layer.head_size for layer in description.layers if layer.head_size]
    query_size = description.query_heads * max(heads, default=0)
    return 2 * query_size + 2 * max(sizes, default=0)


def _mlp(text: Any, hidden: int) -> int:
    """Every expert that a token visits has its own inner numbers, and its output."""
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
