"""Values that a model wrote as bare text, read as the schema of their parameter says."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvell.server.answers.reading.json_text import read_json, write_json
from kvell.server.answers.reading.modes import SPACE

TEXT = frozenset({"string"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_IMPLIED = (
    ("properties", "object"),
    ("items", "array"),
    ("$ref", "object"),
    ("$ref", "string"),
    ("allOf", "object"),
    ("allOf", "string"),
)
"""What a schema without a type may mean."""
_OF_TYPE: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)


def parameter_types(tools: Iterable[Mapping[str, Any]], function: str) -> dict[str, frozenset[str]]:
    """JSON types that each parameter of a function may have.

    :param tools: as :func:`kvell.server.answers.chat_tools.chat_tools` gives them.
    """
    for tool in tools:
        if tool["function"]["name"] == function:
            parameters = tool["function"].get("parameters") or {}
            properties = parameters.get("properties")
            if isinstance(properties, Mapping):
                return {name: _types(schema) for name, schema in properties.items()}
    return {}


def value_text(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value; what is none of the types is a string."""
    bare = text.strip(SPACE)
    try:
        value = read_json(_PYTHON.get(bare, bare))
        if _type(value) in types or (_type(value) == "integer" and "number" in types):
            return write_json(value)
    except ValueError:
        pass
    return write_json(text)


def _types(schema: Any) -> frozenset[str]:
    """Types that a schema names; a string if it names none."""
    named: set[str] = set()
    for part in _alternatives(schema):
        kind = part.get("type")
        if isinstance(kind, str):
            named.add(kind)
        elif isinstance(kind, Sequence):
            named |= {one for one in kind if isinstance(one, str)}
        named |= {kind for key, kind in _IMPLIED if key in part}
        for constant in [part["const"]] if "const" in part else part.get("enum", ()):
            named.add(_type(constant))
    return frozenset(named) or TEXT


def _alternatives(schema: Any) -> list[Mapping[str, Any]]:
    if not isinstance(schema, Mapping):
        return []
    inner = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return [schema, *(part for part in inner if isinstance(part, Mapping))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type(value: Any) -> str:
    return next((name for kind, name in _OF_TYPE if isinstance(value, kind)), "")
