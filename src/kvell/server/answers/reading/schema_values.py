"""Values that a model wrote as bare text, parsed by the schema of their parameter."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvell.engine.protocol.schemas.references import Schema
from kvell.server.answers.reading.modes import SPACE
from kvell.wire.json_text import read_json, write_json

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
"""Types that a schema's keywords imply, as pairs of keyword and type."""
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
    """Return the JSON types of each parameter of a function.

    :param tools: functions of :func:`kvell.server.answers.forced.chat_tools`.
    """
    for tool in tools:
        if tool["function"]["name"] == function:
            parameters = tool["function"].get("parameters") or {}
            properties = parameters.get("properties")
            if isinstance(properties, Mapping):
                return {name: _types(schema) for name, schema in properties.items()}
    return {}


class ParameterTypes:
    """The types of parameters by function, which are read once for all calls of an answer."""

    def __init__(self, tools: Sequence[Schema]) -> None:
        self._tools = tools
        self._types: dict[str, Mapping[str, frozenset[str]]] = {}

    def of(self, function: str) -> Mapping[str, frozenset[str]]:
        if function not in self._types:
            self._types[function] = parameter_types(self._tools, function)
        return self._types[function]


def value_text(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value; a value of no listed type becomes a string."""
    bare = text.strip(SPACE)
    try:
        value = read_json(_PYTHON.get(bare, bare))
        if _type(value) in types or (_type(value) == "integer" and "number" in types):
            return write_json(value)
    except ValueError:
        pass
    return write_json(text)


def _types(schema: Any) -> frozenset[str]:
    """Return the types that a schema names; a string if it names none."""
    named: set[str] = set()
    for part in _alternatives(schema):
        kind = part.get("type")
        if isinstance(kind, str):
            named.add(kind)
        elif isinstance(kind, Sequence):
            named |= {member for member in kind if isinstance(member, str)}
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
