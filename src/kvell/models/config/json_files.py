"""Reading of a model directory's JSON files, with each error as one clear line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething, KvellError
from kvell.wire.decoding import MalformedError, decode_json, has_more_values

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
OVERRIDES_FLAG = "--hf-overrides"
FETCH_AGAIN = "fetch the file again"
FETCH_MODEL_AGAIN = "fetch the model again"
DO_NOT_LOAD = "its weights do not load"
MALFORMED = "its config is malformed"
REPAIR_CONFIG = "repair its config.json"
MAX_JSON_BYTES = 8 << 20
MOST_VALUES = 1 << 18
MAX_VOCABULARY_BYTES = 32 << 20
MOST_VOCABULARY_VALUES = 1 << 20
LONGEST_BEGINNING = 256
MOST_ERROR_CHARS = 4096
VOCABULARIES = frozenset({"tokenizer_config.json", "added_tokens.json"})
"""Files with an entry for each added token: there are hundreds of thousands in models of speech."""


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file.

    :raises ChangeSomething: if the file holds something else.
    """
    return read_json(file) if file.is_file() else {}


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    :raises ChangeSomething: if the file holds something else.
    """
    raw = json_value(file)
    if not isinstance(raw, dict):
        raise ChangeSomething("model", file, "holds no JSON object", FETCH_AGAIN)
    return raw


def json_value(file: Path) -> object:
    """Return the JSON value in a file.

    :raises ChangeSomething: if it is not JSON, or would take much memory.
    """
    is_vocabulary = file.name in VOCABULARIES
    data = file_bytes(file, MAX_VOCABULARY_BYTES if is_vocabulary else MAX_JSON_BYTES)
    most_values = MOST_VOCABULARY_VALUES if is_vocabulary else MOST_VALUES
    if has_more_values(data, most_values):
        raise ChangeSomething("model", file, f"has more than {most_values} values", FETCH_AGAIN)
    try:
        return decode_json(data, hook=_number)
    except MalformedError as error:
        problem = f"is not valid JSON ({one_line(error)})"
        raise ChangeSomething("model", file, problem, FETCH_AGAIN) from error


def file_bytes(file: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file.

    :raises ChangeSomething: if it cannot be read, has more than ``most_bytes``, or is what a failed
        download leaves.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(most_bytes + 1)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ChangeSomething("model", file, problem, "make it readable") from error
    if len(data) > most_bytes:
        raise ChangeSomething("model", file, f"has more than {most_bytes} bytes", FETCH_AGAIN)
    if fault := not_the_file(data[:LONGEST_BEGINNING]):
        raise ChangeSomething("model", file, fault, FETCH_AGAIN)
    return data


@contextmanager
def read_by_library(name: object, problem: str, remedy: str) -> Iterator[None]:
    """Report any error of a library that reads a model's file as one of the file.

    Libraries raise errors of all types for files that they do not understand.

    :raises ChangeSomething: with the problem and the library's error.
    """
    try:
        yield
    except KvellError:
        raise
    except Exception as error:
        why = f"{problem} ({one_line(error)})"
        raise ChangeSomething("model", name, why, remedy) from error


def not_the_file(beginning: bytes) -> str:
    """Return what a failed download left in place of a file; "" if the file looks valid."""
    if not beginning:
        return "is empty"
    if beginning.startswith(b"version https://git-lfs"):
        return "is a pointer of git-lfs in place of the file"
    if beginning.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "is a web page in place of the file"
    return ""


def _number(fields: dict[str, Any]) -> Any:
    return float(fields["__float__"]) if fields.keys() == {"__float__"} else fields


def one_line(error: Exception) -> str:
    """Return an error's message on one line, at most 200 characters; its type if it has none."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(text[:MOST_ERROR_CHARS].split())[:200] or type(error).__name__


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
    raise ChangeSomething(OVERRIDES_FLAG, (text or "")[:200], "is not a JSON object", remedy)


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
