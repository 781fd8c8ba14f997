"""Reader and writer of JSON of models; JSON that clients could not parse is refused."""

import json
from typing import Any, NoReturn

from kvell.server.answers.reading.brackets import BracketSpan
from kvell.server.answers.reading.modes import SPACE
from kvell.wire.decoding import MalformedError, decode_json

DEEPEST = 64
"""The most levels of brackets; deeper text is not a call."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text, whose strings may have line breaks.

    :raises ValueError: if the text is not JSON, or is nested deeper than ``DEEPEST``.
    """
    start = text.lstrip(SPACE)[:1]
    if start in ("{", "["):
        span = BracketSpan(first=start)
        span.scan(text)
        if not span.closed or span.deepest > DEEPEST:
            raise ValueError("brackets do not match, or are too deep")
    try:
        return decode_json(text, constant=_refuse, strict=False)
    except MalformedError as error:
        raise ValueError(str(error)) from error


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
