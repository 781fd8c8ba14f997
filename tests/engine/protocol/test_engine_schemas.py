"""What a schema becomes for the grammar, and what of it is named as not followed."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.schemas.following import (
    MOST_PARTS,
    MOST_PATH_CHARS,
    are_apart,
    make_enforceable,
)
from kvell.engine.protocol.schemas.references import Document, Operations, within
from kvell.engine.protocol.schemas.strict import StrictPart, StrictViolation, find_violation
from tests.depth import many

INT, TEXT = {"type": "integer"}, {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": INT, "b": INT}}
CLOSED = {"additionalProperties": False}


def test_texts_for_readers_make_no_other_grammar() -> None:
    told = OBJECT | {"title": "T", "description": "…", "$schema": "x", "default": {}, "x-y": 1}
    assert make_enforceable(told) == make_enforceable(OBJECT)
    assert make_enforceable(OBJECT).schema == {**OBJECT, **CLOSED}


def test_what_was_sent_stays_as_it_was() -> None:
    schema = {"allOf": [{"$ref": "#/$defs/O"}, OBJECT], "$defs": {"O": OBJECT}, "not": {}}
    before = json.dumps(schema)
    make_enforceable(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("other", [True, False, None, 7, "text", [OBJECT]])
def test_what_is_no_schema_is_left_to_the_grammar(other: object) -> None:
    assert make_enforceable(other).schema == other


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": ["string"]}),
        ({"enum": [1, True, "x"], "not": {"const": 1}}, {"enum": [True, "x"]}),
        ({"enum": [1, 2, 3], "not": {"enum": [2, 3, 4]}}, {"enum": [1]}),
        ({"type": "string", "not": False}, TEXT),
        (
            {**OBJECT, "not": {"required": ["b"]}},
            {"type": "object", "properties": {"a": INT, "b": False}, **CLOSED},
        ),
        (
            {"type": "object", "not": {"required": ["b"]}},
            {"type": "object", "additionalProperties": True, "properties": {"b": False}},
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
            {**OBJECT, **CLOSED},
        ),
        (
            {"type": "object", "propertyNames": {"pattern": r"^\d$"}},
            {"type": "object", "patternProperties": {"^(?:[0-9])$": True}, **CLOSED},
        ),
        (
            {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
            {"type": "object", "patternProperties": {"^(?s:.{2,3})$": True}, **CLOSED},
        ),
        ({"type": "object", "propertyNames": TEXT}, {"type": "object"}),
        (
            {"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1},
            {"type": "array", "items": INT, "maxItems": 1},
        ),
        (
            {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
            {"type": "array", "prefixItems": [INT], "items": False},
        ),
        ({**OBJECT, "minProperties": 0, "maxProperties": 2}, {**OBJECT, **CLOSED}),
        ({**OBJECT, "minProperties": 1}, {**OBJECT, "minProperties": 1, **CLOSED}),
        ({"items": INT}, {"type": "array", "items": INT}),
        ({"anyOf": [TEXT], "items": INT}, {"anyOf": [TEXT], "items": INT}),
    ],
)
def test_keywords_that_others_can_say_are_followed(schema: Any, same: Any) -> None:
    found = make_enforceable(schema)
    assert found.unfollowed == ()
    assert found.schema == same


@pytest.mark.parametrize(
    ("schema", "keyword", "left"),
    [
        ({**TEXT, "format": "path"}, "format", TEXT),
        ({**TEXT, "pattern": "(?=a)b"}, "pattern", TEXT),
        ({**TEXT, "not": {"const": "x"}}, "not", TEXT),
        ({"if": TEXT, "then": {"minLength": 2}}, "if", {}),
        ({"type": "array", "contains": INT}, "contains", {"type": "array"}),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
            "uniqueItems",
            {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        ),
        ({**OBJECT, "minProperties": 2}, "minProperties", {**OBJECT, **CLOSED}),
        ({**OBJECT, "propertyNames": {"pattern": "a"}}, "propertyNames", {**OBJECT, **CLOSED}),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired", {**OBJECT, **CLOSED}),
        ({"oneOf": [TEXT, {"minLength": 2}]}, "oneOf", {"oneOf": [TEXT, {"minLength": 2}]}),
        (
            {"type": "object", "patternProperties": {"(?!x)": INT}, "additionalProperties": False},
            "patternProperties",
            {"type": "object", "patternProperties": {}, "additionalProperties": True},
        ),
    ],
)
def test_what_is_not_followed_is_left_out_and_named(schema: Any, keyword: str, left: Any) -> None:
    found = make_enforceable(schema)
    assert [one.path for one in found.unfollowed][0] == keyword  # noqa: RUF015
    assert found.schema == left
    for inner, place in (
        ({"type": "object", "properties": {"p": schema}}, "properties.p."),
        ({"type": "array", "items": schema}, "items."),
        ({"anyOf": [INT, schema]}, "anyOf[1]."),
        ({"$ref": "#/$defs/D", "$defs": {"D": schema}}, "$defs.D."),
    ):
        problem = f"{keyword} cannot be enforced, and strict is true"
        assert violation(inner) == StrictViolation(f"field.{place}{keyword}", problem)


def violation(schema: object, path: str = "") -> StrictViolation | None:
    return find_violation((StrictPart(path, "field"),), make_enforceable(schema).unfollowed)


def test_a_strict_schema_that_is_followed_is_taken() -> None:
    closed = {**OBJECT, "required": ["a"], "additionalProperties": False}
    assert violation(closed) is None
    long = {"type": "object", "properties": {"x" * 5000: {"format": "path"}}}
    refused = violation(long)
    assert refused is not None and len(str(refused.error())) < 500


def test_only_the_strict_part_must_be_followed() -> None:
    odd = {"format": "path"}
    schema = {
        "properties": {"a": odd, "b": {"properties": {"c": {"$ref": "#name"}}}},
        "$defs": {"N": {"$anchor": "name", "items": odd}},
    }
    assert violation(schema, "properties.c.") is None
    for path, place in (
        ("properties.a.", "field.format"),
        ("properties.b.", "field.properties.c.$ref.items.format"),
    ):
        found = violation(schema, path)
        assert found is not None and found.field == place


@pytest.mark.parametrize(
    ("reference", "names"),
    [
        ("#/$defs/A~1B", ["a"]),
        ("#/$defs/A%2FB/../x", None),
        ("#/$defs/L/anyOf/1", ["b"]),
        ("#here", ["c"]),
        ("https://x.org/s", ["root"]),
        ("https://x.org/s#/$defs/L/anyOf/0", ["l"]),
        ("#/$defs/nobody", None),
        ("https://else.org/s", None),
        (7, None),
    ],
)
def test_references_stay_in_the_document(reference: object, names: list[str] | None) -> None:
    def one(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: True}}

    root = {
        "$id": "https://x.org/s",
        "properties": {"root": True},
        "items": {"$ref": reference},
        "$defs": {
            "A/B": one("a"),
            "L": {"anyOf": [one("l"), one("b")]},
            "H": {"$anchor": "here", **one("c")},
        },
    }
    if names is None:
        with pytest.raises(ValueError, match="has no target"):
            make_enforceable(root)
        return
    schema: Any = make_enforceable(root).schema
    target = schema["$defs"][schema["items"]["$ref"].removeprefix("#/$defs/")]
    assert list(target["properties"]) == names


def test_a_schema_below_another_finds_its_definitions_again() -> None:
    schema = {
        "properties": {"$ref": {"$ref": "#/$defs/D"}, "enum": {"$ref": "#"}},
        "anyOf": [{"$ref": "#/properties/x"}, {"const": {"$ref": "#/y"}}, {"$ref": "#name"}],
        "$defs": {"D": {"default": {"$ref": "#/z"}}},
    }
    assert within(schema, "#/$defs/f") == {
        "properties": {"$ref": {"$ref": "#/$defs/f/$defs/D"}, "enum": {"$ref": "#/$defs/f"}},
        "anyOf": [
            {"$ref": "#/$defs/f/properties/x"},
            {"const": {"$ref": "#/y"}},
            {"$ref": "#name"},
        ],
        "$defs": {"D": {"default": {"$ref": "#/z"}}},
    }


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        ([TEXT, INT], True),
        ([TEXT, TEXT], False),
        ([{"type": ["string", "null"]}, {"type": "null"}], False),
        ([INT, {"type": "number"}], False),
        ([{"enum": [1, 2]}, {"const": 3}], True),
        ([{"enum": [1, 2]}, {"const": 2}], False),
        ([{"const": 1}, INT], False),
        ([{}, INT], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": True}, {"enum": [1, [True]]}, {"enum": [[1], {"a": 1}]}], True),
        ([{"type": 5}, INT], False),
    ],
)
def test_schemas_are_apart_if_types_or_values_say_so(branches: list[Any], apart: bool) -> None:
    assert are_apart(branches, Document({})) is apart


KEYWORDS = (
    *("type", "enum", "const", "format", "pattern", "not", "required", "properties", "items"),
    *("patternProperties", "additionalProperties", "propertyNames", "uniqueItems", "maxItems"),
    *("unevaluatedItems", "unevaluatedProperties", "prefixItems", "allOf", "anyOf", "oneOf"),
    *("$ref", "$defs", "if", "then", "dependentSchemas", "minProperties", "maxProperties"),
    *("minLength", "discriminator", "$anchor", "x-guidance"),
)
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    (None, True, False, 0, -1, 2.5, "", "#", "#/$defs/a", "object", "(?=a)", "path", [], {}, ["a"])
)
SCHEMAS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from((*KEYWORDS, "a")), inner, min_size=1, max_size=5),
    ),
    max_leaves=12,
)


@many()
@given(SCHEMAS)
def test_whatever_is_sent_is_rewritten_or_refused(schema: object) -> None:
    before = json.dumps(schema)
    with contextlib.suppress(ValueError):
        json.dumps(make_enforceable(schema).schema)
    assert json.dumps(schema) == before


def test_rewriting_is_bounded() -> None:
    names = {f"n{i}": INT for i in range(400)}
    wide = {"type": "object", "properties": names, "anyOf": [{"required": ["n1"]}] * 400}
    with pytest.raises(ValueError, match=f"too complex: it has more than {MOST_PARTS} parts"):
        make_enforceable(wide)
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="too complex: it is nested too deeply"):
        make_enforceable(deep)
    chain: dict[str, Any] = {f"D{i}": {"items": {"$ref": f"#/$defs/D{i + 1}"}} for i in range(3000)}
    chain["D3000"] = INT
    schema: Any = make_enforceable({"$ref": "#/$defs/D0", "$defs": chain}).schema
    assert len(schema["$defs"]) == 3001


def referred_choice(names: int, users: int) -> dict[str, Any]:
    """References to a choice of many names, one of whose branches admits any other."""
    branches: list[Any] = [{"required": [f"n{i}"]} for i in range(names)]
    user = {"properties": {"a": {}}, "anyOf": [{"$ref": "#/$defs/b"}]}
    return {
        "properties": {f"q{i}": user.copy() for i in range(users)},
        "$defs": {"b": {"anyOf": [*branches, {"additionalProperties": True}]}},
    }


def chain_of_references(length: int, users: int) -> dict[str, Any]:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(30)}
    chain["d30"] = {"enum": [*range(length)]}
    user = {"enum": [1, 2], "not": {"$ref": "#/$defs/d0"}}
    return {"properties": {f"q{i}": user.copy() for i in range(users)}, "$defs": chain}


def alike_branches(branches: int, names: int) -> dict[str, Any]:
    properties = {f"n{i}": {"enum": [1, 2]} for i in range(names)}
    one = {"type": "object", "properties": properties, "required": [*properties]}
    return {"oneOf": [{"$ref": "#/$defs/b"}] * branches, "$defs": {"b": one}}


def work(schema: object) -> int:
    operations = Operations()
    make_enforceable(schema, operations)
    return operations.done


def test_a_large_choice_costs_its_length_once() -> None:
    assert 0 < work(referred_choice(200, 200)) <= 4 * work(referred_choice(50, 50))
    assert work(referred_choice(200, 400)) - work(referred_choice(200, 200)) <= 4 * 200


@pytest.mark.parametrize("make", [referred_choice, chain_of_references, alike_branches])
def test_all_work_is_counted(make: Callable[[int, int], object]) -> None:
    with pytest.raises(ValueError, match="too complex: its references take more than 90 operat"):
        make_enforceable(make(50, 50), Operations(90))


@pytest.mark.parametrize("make", [chain_of_references, alike_branches])
def test_repeated_parts_are_refused_before_they_cost_much(
    make: Callable[[int, int], object],
) -> None:
    with pytest.raises(ValueError, match="too complex"):
        make_enforceable(make(1500, 1500))


def test_names_of_any_length_make_no_long_paths() -> None:
    odd = {f"n{i}": {"format": "path"} for i in range(100)}
    found = make_enforceable({"properties": {"x" * 9000: {"properties": odd}}}).unfollowed
    assert found and all(len(entry.path) <= MOST_PATH_CHARS for entry in found)


def test_other_properties_are_counted_for_each_branch() -> None:
    rest = {"properties": {f"n{i}": INT for i in range(300)}}
    branches = [{"required": [f"r{i}"]} for i in range(300)]
    with pytest.raises(ValueError, match="too complex: it has more than"):
        make_enforceable({"properties": {}, "unevaluatedProperties": rest, "anyOf": branches})


def test_schemas_that_lead_to_themselves_end() -> None:
    loop = {"allOf": [{"$ref": "#/$defs/L"}, OBJECT]}
    for schema in (
        {"$defs": {"L": {"$ref": "#/$defs/L"}}, "$ref": "#/$defs/L"},
        {"$defs": {"L": loop}, **loop},
        {"$defs": {"L": {"anyOf": [{"$ref": "#/$defs/L"}, OBJECT]}}, "$ref": "#/$defs/L"},
        {"$defs": {"L": {"$ref": "#/$defs/L"}}, "oneOf": [{"$ref": "#/$defs/L"}, INT]},
    ):
        make_enforceable(schema)
