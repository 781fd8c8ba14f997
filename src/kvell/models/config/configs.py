"""Reading of a model's config.json, with each problem as one clear line."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from kvell.errors import ChangeSomething
from kvell.models.config import parallel_heads_config as _own  # registers its type  # noqa: F401
from kvell.models.config.json_files import (
    CONFIG_FILE,
    one_line,
    overridden,
    parsed_overrides,
    read_json,
)

MALFORMED = (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)
"""Errors that transformers raises for fields that it does not understand. Some defaults also need
libraries or hub files, which may be missing (ImportError, OSError)."""


def read_config(path: Path, overrides: str | None = None) -> Any:
    """Read the transformers config of a model directory, or a config file itself.

    :param overrides: a JSON object of fields in place of its own.

    :raises ChangeSomething: if it is missing, is not a JSON object, or is not understood.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise ChangeSomething(
            "model", path, f"holds no {CONFIG_FILE}", "give a transformers model directory"
        )
    raw = overridden(read_json(file), parsed_overrides(overrides))
    return config_from_dict(raw, str(path))


def config_from_dict(raw: Mapping[str, Any], name: str = "config") -> Any:
    """Build a transformers config with all defaults filled in.

    :param name: the user's input, for messages.
    :raises ChangeSomething: if the model type is unknown or a field is malformed.
    """
    model_type = raw.get("model_type")
    classes = ", ".join(map(str, raw.get("architectures") or ()))
    if model_type is None:
        problem = "names no model_type"
        raise ChangeSomething("model", name, f"its config {problem}", "repair its config.json")
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
            "model", name, f"its config is malformed ({one_line(error)})", "repair its config.json"
        ) from error


def whole_config(config: Any) -> Any:
    """Return a transformers config, also for a plain one (``families/plain_config``)."""
    return config_from_dict(vars(config)) if isinstance(config, SimpleNamespace) else config
