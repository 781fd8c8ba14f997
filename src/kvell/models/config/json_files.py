"""Reads the JSON files of a model directory; reports errors in one clear line."""

import json
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething

CONFIG_FILE = "config.json"


def read_optional_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    :raises ChangeSomething: if the file holds something else.
    """
    return read_json(file) if file.is_file() else {}


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    :raises ChangeSomething: if the file holds something else.
    """
    try:
        raw = json.loads(file.read_bytes(), object_hook=_number)
    except ValueError as error:
        raise ChangeSomething(
            "model", file, f"is not valid JSON ({one_line(error)})", "fetch the file again"
        ) from error
    if not isinstance(raw, dict):
        raise ChangeSomething("model", file, "holds no JSON object", "fetch the file again")
    return raw


def _number(found: dict[str, Any]) -> Any:
    """Decode transformers' notation for a number that JSON cannot express."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def one_line(error: Exception) -> str:
    """An error's message on one line, at most 200 characters."""
    return " ".join(str(error).split())[:200]
