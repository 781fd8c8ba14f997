"""Schemas as clients send them, each with values that follow it; drawn by hypothesis."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
Drawn = tuple[Schema, Any]
"""A schema, and a value that follows it and invents nothing."""
Kind = Callable[[st.DrawFn, int, dict[str, Schema]], Drawn]
NAMES = ("name", "age", "tags", "a b", "é", 'quo"te', "back\\slash", "$ref", "properties")
LEAVES: list[tuple[Schema, list[Any]]] = [
    ({"type": "integer", "minimum": -5, "maximum": 20}, [0, -5, 7, 20]),
    ({"type": "boolean"}, [True, False]),
    ({"type": "string", "enum": ["red", "blue"]}, ["red", "blue"]),
    ({"const": "x", "title": "X"}, ["x"]),
    ({"type": "string", "format": "binary", "maxLength": 3}, ["", "ab"]),
    ({"type": ["null", "boolean"]}, [None, True]),
]


@st.composite
def drawn_schemas(draw: st.DrawFn) -> Drawn:
    definitions: dict[str, Schema] = {}
    schema, value = _any(draw, 3, definitions)
    return (schema | {"$defs": definitions} if definitions else schema), value


def _any(draw: st.DrawFn, depth: int, definitions: dict[str, Schema]) -> Drawn:
    kinds: list[Kind] = [_leaf, _object, _array, _any_of, _all_of, _based, _reference]
    return draw(st.sampled_from(kinds if depth else kinds[:1]))(draw, depth - 1, definitions)


def _leaf(draw: st.DrawFn, _depth: int, _definitions: dict[str, Schema]) -> Drawn:
    schema, values = draw(st.sampled_from(LEAVES))
    return dict(schema), draw(st.sampled_from(values))


def _object(
    draw: st.DrawFn,
    depth: int,
    definitions: dict[str, Schema],
    names: tuple[str, ...] = NAMES,
) -> Drawn:
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    parts = {name: _any(draw, depth, definitions) for name in chosen}
    required = [name for name in chosen if draw(st.booleans())]
    given = [name for name in chosen if name in required or draw(st.booleans())]
    properties = {name: schema for name, (schema, _) in parts.items()}
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    return schema, {name: parts[name][1] for name in given}


def _array(draw: st.DrawFn, depth: int, definitions: dict[str, Schema]) -> Drawn:
    items, value = _any(draw, depth, definitions)
    schema = {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    return schema, [value] * draw(st.integers(1, 2))


def _any_of(draw: st.DrawFn, depth: int, definitions: dict[str, Schema]) -> Drawn:
    branches = [_any(draw, depth, definitions) for _ in range(2)]
    return {"anyOf": [one for one, _ in branches]}, draw(st.sampled_from(branches))[1]


def _all_of(draw: st.DrawFn, depth: int, definitions: dict[str, Schema]) -> Drawn:
    first, one = _object(draw, depth, definitions, NAMES[:4])
    second, other = _object(draw, depth, definitions, NAMES[4:])
    return {"allOf": [_maybe_named(draw, first, definitions), second]}, one | other


def _based(draw: st.DrawFn, depth: int, definitions: dict[str, Schema]) -> Drawn:
    """An object that says something itself, and something else in each of its branches."""
    base, one = _object(draw, depth, definitions, NAMES[:4])
    branches = [_object(draw, depth, definitions, NAMES[4:]) for _ in range(2)]
    more = [_maybe_named(draw, branch, definitions) for branch, _ in branches]
    return base | {"anyOf": more}, one | draw(st.sampled_from(branches))[1]


def _reference(draw: st.DrawFn, depth: int, definitions: dict[str, Schema]) -> Drawn:
    schema, value = _any(draw, depth, definitions)
    return _named(schema, definitions), value


def _maybe_named(draw: st.DrawFn, schema: Schema, definitions: dict[str, Schema]) -> Schema:
    return _named(schema, definitions) if draw(st.booleans()) else schema


def _named(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    name = f"D/{len(definitions)}"
    definitions[name] = schema
    return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}
