"""Reading of complete configs without transformers.

transformers' configs fill in fields that a file omits, but take a second to import. Files that
transformers itself wrote for a dense model omit none.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvell.models.config.json_files import (
    CONFIG_FILE,
    overridden,
    parsed_overrides,
    read_optional_json,
)
from kvell.models.families.families import FUSED, FusedFamily

SIZES = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
NEEDED = (*SIZES, "rms_norm_eps", "tie_word_embeddings")
"""Fields that every decoder's config must have."""

UNUSUAL = frozenset(
    {"auto_map", "per_layer_config", "quantization_config", "rope_scaling", "rope_theta"}
)
"""Fields that need transformers: custom code, other weights, and rotations of older files."""


def plain_config(path: Path, overrides: str | None = None) -> Any | None:
    """Read the config of a model directory; None if only transformers can interpret it.

    :param overrides: a JSON object of fields in place of its own.
    """
    raw = overridden(read_optional_json(path / CONFIG_FILE), parsed_overrides(overrides))
    family = _family(raw)
    if family is None or raw.keys() & UNUSUAL:
        return None
    if not _has_all_fields(raw, family) or not _has_plain_ropes(
        raw.get("rope_parameters"), raw, family
    ):
        return None
    return SimpleNamespace(**raw)


def known_config(path: Path, overrides: str | None = None) -> Any:
    """Read the config of a model directory, by transformers only if needed.

    :param overrides: a JSON object of fields in place of its own.
    :raises ChangeSomething: if it is missing, is not a JSON object, or is not understood.
    """
    config = plain_config(path, overrides)
    if config is not None:
        return config
    # Imported here: transformers' configs take a second to import.
    from kvell.models.config.configs import read_config

    return read_config(path, overrides)


def _family(raw: Mapping[str, Any]) -> FusedFamily | None:
    model_type, named = raw.get("model_type"), raw.get("architectures")
    matches = (f for name, f in FUSED.items() if f.model_type == model_type and named == [name])
    family = next(matches, None)
    return None if family is None or family.mixer else family


def _has_all_fields(raw: Mapping[str, Any], family: FusedFamily) -> bool:
    own = (family.activation, family.scaled_by, family.rope_layers)
    biases = (family.attention_bias, family.mlp_bias)
    needed = (*NEEDED, *filter(None, (*own, *biases)))
    return (
        all(raw.get(field) is not None for field in needed)
        and all(field in raw for field in family.fields)
        and all(type(raw[field]) is int and raw[field] > 0 for field in SIZES)
        and all(type(raw[field]) is bool for field in filter(None, biases))
        and isinstance(raw["rms_norm_eps"], float)
        and isinstance(raw.get("sliding_window"), int | None)
        and isinstance(raw.get("layer_types"), list | None)
    )


def _has_plain_ropes(ropes: Any, raw: Mapping[str, Any], family: FusedFamily) -> bool:
    """Return whether all rotations are of the default kind, given by a base alone."""
    if not isinstance(ropes, dict):
        return False
    types = set(raw["layer_types"]) if family.ropes_by_type else ()
    return all(
        isinstance(rope, dict)
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        for rope in ([ropes.get(kind) for kind in types] if types else [ropes])
    )
