"""Reading of complete configs without transformers.

transformers' configs fill in fields that a file omits, but their import brings torch and takes
nine seconds of a processor, a whole `kvell plan` without them one. Files that transformers itself
wrote for a dense model omit none.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvell.models.config.config_values import check_config_values
from kvell.models.config.json_files import (
    CONFIG_FILE,
    MALFORMED,
    REPAIR_CONFIG,
    overridden,
    parsed_overrides,
    read_by_library,
    read_optional_json,
)
from kvell.models.families.families import FUSED, FusedFamily, classes_of
from kvell.models.families.sized_families import Fields, SizedFamily, complete_fields, with_omitted
from kvell.models.families.sized_images import (
    SizedImages,
    images_of,
    is_tied,
    text_fields,
    vision_fields,
    whole_fields,
)

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

READ_FOR_SIZES = frozenset({"auto_map", "quantization_config", "rope_scaling", "rope_theta"})
READ_ROPES = frozenset({None, "default", "llama3", "linear", "yarn"})
"""Rotations of which a context's length is known: of all but linear and YaRN, the file's own."""

TYPES_WITH_ROPES = {family.model_type for family in FUSED.values() if family.ropes_by_type} | {
    "gemma3n_text"
}
"""Model types whose older files give the rotation of full layers alone."""


def plain_config(path: Path, overrides: str | None = None) -> Any | None:
    """Read the config of a model directory; None if only transformers can interpret it."""
    raw = _raw(path, overrides)
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

    :raises ChangeSomething: if it is missing, is not a JSON object, or is not understood.
    """
    config = plain_config(path, overrides)
    if config is not None:
        return config
    # Imported here: transformers' configs take a second to import.
    from kvell.models.config.configs import read_config

    return read_config(path, overrides)


def sizes_config(path: Path, overrides: str | None = None) -> Any:
    """Read the config of a model directory, or a config file, for the sizes of layers and weights.

    Omitted fields are filled in for the families whose defaults are listed, and rotations are not
    read, so that most published configs of dense models need no transformers.

    :raises ChangeSomething: if it is missing, is not a JSON object, or is not understood.
    """
    raw = _raw(path, overrides)
    with read_by_library(path, MALFORMED, REPAIR_CONFIG):
        images = images_of(raw)
        fields = _image_sizes(images, raw) if images else _text_sizes(raw)
    return known_config(path, overrides) if fields is None else SimpleNamespace(**fields)


def _image_sizes(images: SizedImages, raw: Mapping[str, object]) -> Fields | None:
    """Return the fields of a config of images and text; None if only transformers reads it."""
    given = text_fields(images, raw)
    vision = vision_fields(images, raw)
    whole = whole_fields(images, raw)
    if given is None or vision is None:
        return None
    if any(type(whole[name]) is not int for name in images.needed):
        return None
    named = [name for name, family in FUSED.items() if family.model_type == given["model_type"]]
    given |= {"tie_word_embeddings": is_tied(images, whole, given)}
    if images.text is not None:
        named = [images.text.architecture]
    text = _text_sizes(given | {"architectures": named}, images.text)
    if text is None:
        return None
    parts = {"text_config": SimpleNamespace(**text), "vision_config": SimpleNamespace(**vision)}
    return whole | parts


def _text_sizes(raw: Mapping[str, object], family: SizedFamily | None = None) -> Fields | None:
    """Return the fields of a text's config; None if only transformers reads it.

    :param family: the family of a text with images; by default, the one that the config names.
    """
    if not _is_readable(raw):
        return None
    fields = with_omitted(family, raw) if family else complete_fields(raw) or _dense_sizes(raw)
    return None if fields is None else fields | {"rope_parameters": _ropes(raw)}


def _dense_sizes(raw: Mapping[str, object]) -> Fields | None:
    """Return the fields of a config of a fused family whose defaults are listed; else None."""
    family = _family(raw)
    if family is None or not family.size_defaults:
        return None
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    width = {}
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        width["head_dim"] = hidden // heads
    given = {name: value for name, value in raw.items() if (name, value) != ("head_dim", None)}
    filled = {"rms_norm_eps": 1e-6, **width, **dict(family.size_defaults), **given}
    filled.setdefault(family.activation, "unread")
    filled.setdefault(family.scaled_by or family.activation, 1)
    has_types = not filled.get("use_sliding_window") or filled.get("layer_types") is not None
    return filled if has_types and _has_all_fields(filled, family) else None


def _raw(path: Path, overrides: str | None) -> Mapping[str, Any]:
    file = path / CONFIG_FILE if path.is_dir() else path
    raw = overridden(read_optional_json(file), parsed_overrides(overrides))
    check_config_values(raw, path)
    return raw


def _is_readable(raw: Mapping[str, object]) -> bool:
    if raw.keys() & (UNUSUAL - READ_FOR_SIZES):
        return False
    ropes = _ropes(raw)
    if ropes is None:
        return False
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    return all(rope.get("rope_type") in READ_ROPES for rope in nested)


def _ropes(raw: Mapping[str, object]) -> dict[str, object] | None:
    """Return a config's rotations in the form of newer files; None if they are malformed."""
    ropes = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(ropes, dict):
        return None
    if any(isinstance(rope, dict) for rope in ropes.values()):
        return ropes
    if raw.get("rope_scaling") and raw.get("model_type") in TYPES_WITH_ROPES:
        ropes = ropes | {"rope_type": ropes.get("rope_type", ropes.get("type"))}
        return {"full_attention": ropes}
    return ropes | {"rope_type": ropes.get("rope_type", ropes.get("type"))}


def _family(raw: Mapping[str, Any]) -> FusedFamily | None:
    model_type, named = raw.get("model_type"), raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        return None
    matches = (
        family
        for name, family in FUSED.items()
        if family.model_type == model_type and named[0] in classes_of(name)
    )
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
    if not isinstance(ropes, dict):
        return False
    types = set(raw["layer_types"]) if family.ropes_by_type else ()
    return all(
        isinstance(rope, dict)
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        for rope in ([ropes.get(kind) for kind in types] if types else [ropes])
    )
