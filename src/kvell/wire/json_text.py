"""Reader and writer of JSON of models; JSON that clients could not parse is refused."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kvell.wire.decoding import MalformedError, decode_json

DEEPEST = 64
"""The most levels of brackets; deeper text is not a call."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text, whose strings may have line breaks.

    :raises ValueError: if the text is not JSON, or is nested deeper than ``DEEPEST``.
    """
    try:
        value = decode_json(text, constant=_refuse, strict=False)
    except MalformedError as error:
        raise ValueError(str(error)) from error
    if depth_of(value, DEEPEST) > DEEPEST:
        raise ValueError("brackets are too deep")
    return value


def depth_of(value: object, most: int) -> int:
    """Return the number of nested levels of objects and lists in a JSON value.

    It counts level by level, so no depth can exhaust the stack; beyond ``most`` it stops.
    """
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, Mapping | list | tuple)]:
        depth += 1
        if depth > most:
            return depth
        level = [
            part
            for item in level
            for part in (item.values() if isinstance(item, Mapping) else item)
        ]
    return depth


def write_json(value: Any) -> str:
    """Return the JSON text of a value, in characters that UTF-8 can encode.

    :raises ValueError: if the value has an infinite number or NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
