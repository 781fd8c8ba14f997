"""Reading of a model's config.json, with each problem as one clear line."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING

from kvell.errors import ChangeSomething
from kvell.models.config.config_values import check_config_values
from kvell.models.config.json_files import (
    CONFIG_FILE,
    MALFORMED,
    REPAIR_CONFIG,
    overridden,
    parsed_overrides,
    read_by_library,
    read_json,
)


def read_config(path: Path, overrides: str | None = None) -> Any:
    """Read the transformers config of a model directory, or a config file itself.


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

    :raises ChangeSomething: if the model type is unknown or a field is malformed.
    """
    check_config_values(raw, name)
    model_type = raw.get("model_type")
    classes = ", ".join(map(str, raw.get("architectures") or ()))
    if model_type is None:
        problem = "names no model_type"
        raise ChangeSomething("model", name, f"its config {problem}", REPAIR_CONFIG)
    if model_type not in CONFIG_MAPPING:
        raise ChangeSomething(
            "model",
            name,
            f"its config names the unknown model type {model_type!r}"
            + (f", to be run by {classes}" if classes else ""),
            "use a model that the installed transformers knows",
        )
    with read_by_library(name, MALFORMED, REPAIR_CONFIG):
        return CONFIG_MAPPING[model_type].from_dict(dict(raw))


def whole_config(config: Any) -> Any:
    return config_from_dict(vars(config)) if isinstance(config, SimpleNamespace) else config
