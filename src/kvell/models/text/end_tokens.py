"""The token ids that end a text, from a model's files alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    overridden,
    parsed_overrides,
    read_optional_json,
)
from kvell.wire.decoding import MalformedError, decode

MOST_TOKEN_ID = (1 << 31) - 1
PLAIN_CLASS = "TokenizersBackend"
"""transformers' name for a tokenizer that is entirely in its ``tokenizer.json``."""


class _Added(msgspec.Struct):
    content: str
    token_id: int = msgspec.field(name="id")


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Added] = []


_TOKENIZER_FILE = msgspec.json.Decoder(_TokenizerFile)


def eos_token_ids(path: Path, overrides: str | None = None) -> frozenset[int]:
    """Return end-of-sequence ids of a model directory, with or without a tokenizer.

    They are read from ``generation_config.json``, else from ``config.json``; may be empty.
    """
    config: Mapping[str, Any] = overridden(
        read_optional_json(path / CONFIG_FILE), parsed_overrides(overrides)
    )
    for file, raw in (
        (GENERATION_FILE, read_optional_json(path / GENERATION_FILE)),
        (CONFIG_FILE, config),
    ):
        own, nested = (part.get("eos_token_id") for part in (raw, _nested(raw)))
        _require_ids(path / file, own, nested)
        if ids := ids_of(own) or ids_of(nested):
            return ids
    return frozenset()


def _require_ids(file: Path, *values: object) -> None:
    """Raise unless each value is a token id, a list of them, or missing.

    :raises ChangeSomething: naming the file.
    """
    for value in values:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token <= MOST_TOKEN_ID for token in ids):
            problem = f"its eos_token_id is {str(value)[:60]}, which is no token id"
            raise ChangeSomething("model", file, problem, "repair the file")


def _nested(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    text = raw.get("text_config")
    return text if isinstance(text, dict) else {}


def tokenizer_end_ids(path: Path) -> frozenset[int] | None:
    """Return the tokenizer's own ids that end a text; None if the files do not show them."""
    config = read_optional_json(path / "tokenizer_config.json")
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if config.get("tokenizer_class") != PLAIN_CLASS or not isinstance(token, str):
        return None
    try:
        raw = (path / "tokenizer.json").read_bytes()
        added = decode(_TOKENIZER_FILE, raw).added_tokens
    except (OSError, MalformedError):
        return None
    ids = frozenset(token_entry.token_id for token_entry in added if token_entry.content == token)
    return ids or None


def ids_of(value: int | Sequence[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,) if isinstance(value, int) else value)
