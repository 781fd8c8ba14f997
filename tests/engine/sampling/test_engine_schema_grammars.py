"""Grammars of schemas as clients send them: nothing is invented, nothing that fits is refused."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.depth import some
from tests.engine.sampling.byte_grammars import schema_accepts, walked

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


@some()
@given(drawn_schemas())
def test_a_value_that_invents_nothing_is_an_answer(drawn: Drawn) -> None:
    schema, value = drawn
    Draft202012Validator(schema).validate(value)
    assert schema_accepts(schema, value)


@some()
@given(drawn_schemas(), st.integers(0, 1000))
def test_an_answer_fits_and_has_only_named_properties_each_once(drawn: Drawn, seed: int) -> None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names)
        assert set(names) <= set(NAMES)
        return dict(pairs)

    text = walked(drawn[0], random.Random(seed))
    value = json.loads(text, object_pairs_hook=once)
    Draft202012Validator(drawn[0]).validate(value)


def object_of(*required: str, **more: Any) -> dict[str, Any]:
    properties = {name: {"type": "integer"} for name in required}
    return {"type": "object", "properties": properties, "required": [*required], **more}


A, B, C, AB = object_of("a"), object_of("b"), object_of("c"), {"a": 1, "b": 2}
INT = {"type": "integer"}
TREE = {
    "$defs": {"Tree": object_of("v", description="a tree")},
    "$ref": "#/$defs/Tree",
}
TREE["$defs"]["Tree"]["properties"]["next"] = {  # type: ignore[index]
    "allOf": [{"$ref": "#/$defs/Tree"}],
    "default": None,
}
LIST = object_of("v") | {"additionalProperties": False}
LIST["properties"]["next"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
ONE_OF = {
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "$defs": {
        "A": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
        "B": {"properties": {"k": {"const": "b"}, "n": INT}, "required": ["k"]},
    },
}


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (A, [{"a": 1}], [{}, {"a": 1, "x": 2}]),
        ({**A, "additionalProperties": True}, [{"a": 1}, {"a": 1, "x": "y"}], [{}]),
        ({**A, "additionalProperties": INT}, [{"a": 1, "x": 2}], [{"a": 1, "x": "y"}]),
        ({**A, "unevaluatedProperties": INT}, [{"a": 1, "x": 2}], [{"a": 1, "x": "y"}]),
        ({**A, "patternProperties": {"^x": INT}}, [{"a": 1, "x1": 2}], [{"a": 1, "y": 2}]),
        (
            {**A, "properties": {"x1": INT}, "required": [], "patternProperties": {"^x": INT}},
            [{"x1": 1}, {"x2": 1}, {"x1": 1, "x2": 2}],
            [{"x1": "y"}, {"x2": "y"}],
        ),
        ({"type": "object"}, [{}, {"x": [1, {"y": None}]}], []),
        ({"type": "object", "additionalProperties": INT}, [{}, {"x": 1}], [{"x": "y"}]),
        ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
        ({"type": "object", "unevaluatedProperties": False}, [{}], [{"x": 1}]),
        ({"properties": {"a": INT}}, [{}, {"a": 1}], [{"x": 1}, "text"]),
        ({**A, "required": ["a", "x"]}, [{"a": 1, "x": [2]}], [{"a": 1}]),
        ({"allOf": [A, B]}, [AB], [{"a": 1}, {**AB, "x": 3}]),
        ({"allOf": [A, B], "unevaluatedProperties": False}, [AB], [{**AB, "x": 3}]),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, [AB, {**AB, "x": 3}], []),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 2}], [{"a": 1, "x": 2}, AB]),
        ({**A, "anyOf": [B, C]}, [AB, {"a": 1, "c": 2}], [{"a": 1}, {**AB, "c": 3}]),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, [AB, {"a": 1}], [{"a": 1, "x": 2}]),
        ({**A, "anyOf": [{"anyOf": [B, C]}, {}]}, [{"a": 1, "c": 2}], [{"a": 1, "x": 2}]),
        ({**A, "anyOf": [B], "oneOf": [C]}, [{**AB, "c": 3}], [{**AB, "c": 3, "x": 4}]),
        ({**A, "additionalProperties": True, "anyOf": [B]}, [AB, {**AB, "x": 3}], [{"a": 1}]),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, [AB], [{"b": 2}, {**AB, "x": 3}]),
        (TREE, [{"v": 1}, {"v": 1, "next": {"v": 2}}], [{"v": 1, "next": {"v": 2, "x": 3}}]),
        (LIST, [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1, "next": {"x": 2}}]),
        (ONE_OF, [{"k": "a"}, {"k": "b", "n": 1}], [{"k": "a", "n": 1}, {"k": "c"}]),
        ({**A, "if": {"properties": {"a": {"const": 1}}}, "then": B}, [{"a": 1}, AB], [{"x": 1}]),
    ],
)
def test_objects_are_closed_unless_the_schema_opens_them(
    schema: Any, fitting: list[Any], others: list[Any]
) -> None:
    assert [value for value in fitting if not schema_accepts(schema, value)] == []
    assert [value for value in others if schema_accepts(schema, value)] == []
