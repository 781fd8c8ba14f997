"""How much memory a forward pass of transformers' own code takes beside weights and KV."""

from typing import Any

from kvell.elastic.arena import ActivationModel
from kvell.models.description import text_config
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
    hidden = int(text.hidden_size)
    intermediate = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    return ActivationModel(
        fixed_bytes=FIXED_BYTES,
        token_bytes=4 * (HIDDEN_COPIES * hidden + INTERMEDIATE_COPIES * intermediate),
        logits_row_bytes=2 * 4 * int(text.vocab_size),
    )
