"""Reading of a model directory's JSON files, with each error as one clear line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

CONFIG_FILE = "config.json"
OVERRIDES_FLAG = "--hf-overrides"
FETCH_AGAIN = "fetch the file again"


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file.

    :raises ChangeSomething: if the file holds something else.
    """
    return read_json(file) if file.is_file() else {}


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    :raises ChangeSomething: if the file holds something else.
    """
    data = file.read_bytes()
    if fault := not_the_file(data):
        raise ChangeSomething("model", file, fault, FETCH_AGAIN)
    try:
        raw = decode_json(data, hook=_number)
    except MalformedError as error:
        raise ChangeSomething(
            "model", file, f"is not valid JSON ({one_line(error)})", "fetch the file again"
        ) from error
    if not isinstance(raw, dict):
        raise ChangeSomething("model", file, "holds no JSON object", "fetch the file again")
    return raw


def not_the_file(beginning: bytes) -> str:
    """Return what a failed download left in place of a file; "" if the file looks valid.

    :param beginning: of the file, or all of it.
    """
    if not beginning:
        return "is empty"
    if beginning.startswith(b"version https://git-lfs"):
        return "is a pointer of git-lfs in place of the file"
    if beginning.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "is a web page in place of the file"
    return ""


def _number(fields: dict[str, Any]) -> Any:
    """Decode transformers' notation for a number that JSON cannot express."""
    return float(fields["__float__"]) if fields.keys() == {"__float__"} else fields


def one_line(error: Exception) -> str:
    """Return an error's message on one line, at most 200 characters."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())[:200]


def parsed_overrides(text: str | None) -> dict[str, object]:
    """Return the fields that a JSON object gives in place of a config's own; none for None.

    :raises ChangeSomething: if the text is not a JSON object.
    """
    try:
        fields = decode_json(text) if text is not None else {}
    except MalformedError:
        fields = None
    if isinstance(fields, dict):
        return fields
    remedy = """write it like '{"max_position_embeddings": 8192}'"""
    raise ChangeSomething(OVERRIDES_FLAG, text, "is not a JSON object", remedy)


def overridden(raw: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Return a config with fields replaced; those of nested configs are merged, as in vLLM.

    Newer files have ``rope_parameters`` in place of ``rope_theta`` and ``rope_scaling``, which
    model cards name: a scaling that is given keeps the file's theta.
    """
    changed = dict(raw)
    ropes = raw.get("rope_parameters")
    if "rope_scaling" in overrides and isinstance(ropes, Mapping):
        kept = {"rope_theta", "partial_rotary_factor"}
        changed |= {name: value for name, value in ropes.items() if name in kept}
        del changed["rope_parameters"]
    for name, value in overrides.items():
        nested = changed.get(name)
        if name.endswith("_config") and isinstance(value, dict) and isinstance(nested, dict):
            changed[name] = overridden(nested, value)
        else:
            changed[name] = value
    return changed
