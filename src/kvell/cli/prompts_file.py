"""Reader of prompts from a file of JSON lines."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json, has_more_values

_FIELD = "--prompts"
MOST_LINE_CHARS = 1 << 23
MOST_VALUES = 1 << 17
"""The most lists, objects and fields of one line; numbers in a list are not counted."""


@dataclass(frozen=True)
class PromptLine:
    """One request of the file.

    :param prompt: text, or token ids as int32 ``[n]``.
    :param max_tokens: None: the command's.
    :param model: name of the model that answers; "" is the first.
    """

    prompt: str | NDArray[np.int32]
    max_tokens: int | None = None
    model: str = ""


def read_prompts(path: str) -> list[PromptLine]:
    """Return the file's requests in order; empty lines are skipped, ``-`` reads stdin.

    Lines are ``{"prompt": text}`` or ``{"prompt_token_ids": [ids]}``, each with an
    optional ``max_tokens`` and ``model``; other keys are ignored, except ``images``.

    :raises ChangeSomething: with the file and the line.
    """
    lines = _numbered_lines(path)
    prompts = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not prompts:
        raise ChangeSomething(_FIELD, path, "holds no prompts", 'add lines like {"prompt": "Hi"}')
    return prompts


def _numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        if path == "-":
            yield from _bounded_lines(path, sys.stdin)
            return
        # No other ends of lines: JSON text may have U+2028.
        with Path(path).open(encoding="utf-8", newline="\n") as file:
            yield from _bounded_lines(path, file)
    except UnicodeDecodeError as error:
        raise ChangeSomething(_FIELD, path, "is not UTF-8 text", "save it as UTF-8") from error
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise ChangeSomething(_FIELD, path, problem, "give the path of a readable file") from error


def _bounded_lines(path: str, file: IO[str]) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(MOST_LINE_CHARS):
        number += 1
        if len(line) == MOST_LINE_CHARS:
            raise _wrong(f"{path}:{number}", f"has {MOST_LINE_CHARS} characters or more")
        yield number, line


def _parse(line: str, where: str) -> PromptLine:
    if has_more_values(line, MOST_VALUES):
        raise _wrong(where, f"has more than {MOST_VALUES} values")
    try:
        fields = decode_json(line)
    except MalformedError as error:
        raise _wrong(where, f"is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _wrong(where, "is not a JSON object")
    if fields.get("images"):
        raise ChangeSomething(_FIELD, where, "has images, which cannot be served yet", "leave out")
    max_tokens = _max_tokens(fields.get("max_tokens"), where)
    return PromptLine(_prompt(fields, where), max_tokens, _model(fields.get("model"), where))


def _prompt(fields: dict[str, Any], where: str) -> str | NDArray[np.int32]:
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise _wrong(where, "must have either prompt or prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise _wrong(where, "has a prompt that is not text")
    if text is not None and not _is_utf8(text):
        raise _wrong(where, "has a prompt with half of a surrogate pair")
    return text if isinstance(text, str) else _token_ids(token_ids, where)


def _token_ids(value: object, where: str) -> NDArray[np.int32]:
    if not isinstance(value, list) or not all(_is_whole(token) for token in value):
        raise _wrong(where, "has prompt_token_ids that are not a list of whole numbers")
    if not all(0 <= token < 2**31 for token in value):
        raise _wrong(where, "has a token id out of range")
    return np.array(value, dtype=np.int32)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _max_tokens(value: object, where: str) -> int | None:
    if value is None or (isinstance(value, int) and _is_whole(value) and value > 0):
        return value
    raise _wrong(where, "has max_tokens that is not a whole number above 0")


def _model(value: object, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise _wrong(where, "has a model that is not text")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(where: str, problem: str) -> ChangeSomething:
    return ChangeSomething(_FIELD, where, problem, 'write lines like {"prompt": "Hi"}')
