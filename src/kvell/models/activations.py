"""How much memory a forward pass of transformers' own code takes beside weights and KV."""

from collections.abc import Sequence
from typing import Any

from kvell.elastic.arena import ActivationModel
from kvell.models.config_fields import optional_size, text_config
from kvell.vocabulary import MIB

FIXED_BYTES = 32 * MIB
"""Library scratch: oneDNN's packed copies and thread-local buffers."""
HIDDEN_COPIES = 12
"""Hidden-size rows alive at the widest point of a layer, some of them in float32."""
INTERMEDIATE_COPIES = 3
"""Gate, up and their product."""


def activation_model(config: Any) -> ActivationModel:
    """The fixed reserve's model, from a config alone; counted in float32 throughout."""
    text = text_config(config)
    hidden = int(text.hidden_size) * (optional_size(text, ("altup_num_inputs",)) or 1)
    intermediate = _widest(getattr(text, "intermediate_size", None)) or 4 * hidden
    return ActivationModel(
        fixed_bytes=FIXED_BYTES,
        token_bytes=4
        * (HIDDEN_COPIES * hidden + INTERMEDIATE_COPIES * intermediate + _latent_numbers(text)),
        logits_row_bytes=2 * 4 * int(text.vocab_size),
    )


def _widest(sizes: int | Sequence[int] | None) -> int:
    """Layers may differ in size (Gemma 3n)."""
    return int(sizes or 0) if not isinstance(sizes, Sequence) else max(map(int, sizes))


def _latent_numbers(text: Any) -> int:
    """Queries and outputs of latents: every head's is as long as a latent."""
    latent_size = optional_size(text, ("kv_lora_rank",))
    if not latent_size:
        return 0
    rotary_size = optional_size(text, ("qk_rope_head_dim",))
    return int(text.num_attention_heads) * (2 * latent_size + rotary_size)
