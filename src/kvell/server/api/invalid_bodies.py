"""Messages about invalid bodies: one line that names the field as the client wrote it."""

from collections.abc import Mapping, Sequence
from typing import Any

Error = Mapping[str, Any]
"""A validation error of pydantic."""
NOT_JSON = "the body is not valid JSON"
LONGEST_TAG = 64


def complaint(errors: Sequence[Error], body: object) -> tuple[str, str | None]:
    """Return a message about a body that its schema refuses, and the name of the field.

    A value of a union has errors of each member.  Only the errors at the deepest place count: they
    are those of the closest member.  The message repeats only names and types of the body.

    :param errors: at least one; their places begin with ``body``.
    :param body: the parsed JSON.
    """
    if errors[0]["type"] == "json_invalid":
        return NOT_JSON, None
    places = [_place(error, body) for error in errors]
    field = places[0][:1]
    near = [
        (place, error) for place, error in zip(places, errors, strict=True) if place[:1] == field
    ]
    deepest = max((place for place, _ in near), key=len)
    words = dict.fromkeys(_words(error) for place, error in near if place == deepest)
    name = _written(deepest)
    return f"{name or 'body'}: {', or '.join(words)}", name or None


def _place(error: Error, body: object) -> list[str | int]:
    """Return the keys and indices that lead to a value, without names of union members."""
    place: list[str | int] = []
    parts = list(error["loc"])[1:] if error["loc"][:1] == ("body",) else list(error["loc"])
    value: Any = body
    for number, part in enumerate(parts):
        if _has(value, part):
            value = value[part]
        elif error["type"] != "missing" or number + 1 < len(parts):
            continue
        place.append(part)
    return place


def _has(value: object, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and 0 <= part < len(value)
    return isinstance(value, Mapping) and part in value


def _words(error: Error) -> str:
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        expected = error["ctx"].get("expected_tags")
        tag = str(error["ctx"].get("tag", ""))[:LONGEST_TAG]
        remedy = f"use one of {expected}" if expected else "say its type"
        return f"type={tag}: is not served; {remedy}" if tag else f"has no type; {remedy}"
    return str(error["msg"])


def _written(place: Sequence[str | int]) -> str:
    """Return a place as a name, such as ``messages[0].content``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
