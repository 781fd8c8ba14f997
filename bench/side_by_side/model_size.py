"""Bytes that a model's step must read and parameters it multiplies, from its files alone."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

HEAD = "lm_head"
LOOKED_UP = ("embed_tokens", HEAD)
"""Weights of which a prompt token reads one row, or that only its last token multiplies."""


FOUR_BITS, EIGHT_BITS = 20 / 32, 34 / 32
"""Bytes per number in blocks of 32, scales and minima included."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a text model with plain attention.

    :param weight_bytes: weights that a decode step reads; without a separate embedding.
    :param prefill_parameters: parameters that multiply every prompt token.
    :param kv_token_bytes: keys and values of a token in all layers.
    """

    weight_bytes: int
    prefill_parameters: int
    kv_token_bytes: int


def model_size(directory: Path, element_bytes: int = 2, *, four_bits: bool = False) -> ModelSize:
    """Sizes of a model in a transformers directory with safetensors.

    :param four_bits: linears are stored in four bits, embeddings in eight.
    """
    config = json.loads((directory / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    counts = _parameters(directory)
    has_head = any(HEAD in name for name in counts)
    looked_up = sum(n for name, n in counts.items() if any(part in name for part in LOOKED_UP))
    linears = sum(counts.values()) - looked_up
    read = sum(n for name, n in counts.items() if HEAD in name) if has_head else looked_up
    by_linear, by_head = (FOUR_BITS, EIGHT_BITS) if four_bits else (element_bytes, element_bytes)
    return ModelSize(
        round(linears * by_linear + read * by_head),
        linears,
        2 * config["num_hidden_layers"] * heads * head_size * element_bytes,
    )


def _parameters(directory: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                size = 1
                for extent in tensors.get_slice(name).get_shape():
                    size *= extent
                counts[name] = size
    return counts
