"""Reading a model's config.json, with one clear line for everything that may be wrong in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from kvell.errors import ChangeSomething
from kvell.models import parallel_heads_config as _own  # transformers learns it  # noqa: F401

CONFIG_FILE = "config.json"
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)
"""What transformers raises for fields that it does not understand; for some defaults it wants
libraries, or files of the hub, that are not there."""


def read_config(path: Path) -> Any:
    """The transformers config of a model directory, or of a config file itself.

    :raises ChangeSomething: if it is missing, is no JSON object, or is not understood.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise ChangeSomething(
            "model", path, f"holds no {CONFIG_FILE}", "give a transformers model directory"
        )
    return config_from_dict(_read_json(file), str(path))


def config_from_dict(raw: Mapping[str, Any], name: str = "config") -> Any:
    """A transformers config with every default filled in.

    :param name: what the user gave, for messages.
    :raises ChangeSomething: if the model type is unknown or a field is malformed.
    """
    model_type = raw.get("model_type")
    classes = ", ".join(map(str, raw.get("architectures") or ()))
    if model_type not in CONFIG_MAPPING:
        raise ChangeSomething(
            "model",
            name,
            f"its config names the unknown model type {model_type!r}"
            + (f", to be run by {classes}" if classes else ""),
            "use a model that the installed transformers knows",
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(raw))
    except (*MALFORMED, ImportError, OSError) as error:
        raise ChangeSomething(
            "model", name, f"its config is malformed ({_line(error)})", "repair its config.json"
        ) from error


def read_optional_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    :raises ChangeSomething: if the file holds something else.
    """
    return _read_json(file) if file.is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_bytes(), object_hook=_number)
    except ValueError as error:
        raise ChangeSomething(
            "model", file, f"is not valid JSON ({_line(error)})", "fetch the file again"
        ) from error
    if not isinstance(raw, dict):
        raise ChangeSomething("model", file, "holds no JSON object", "fetch the file again")
    return raw


def _number(found: dict[str, Any]) -> Any:
    """What transformers writes for a number that JSON has no word for."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
