"""Constraints in llguidance's words: patterns, schemas, and answers that may be calls instead."""

import json
from typing import Any

import pytest
from llguidance._lib import LLMatcher

from kvell.engine.protocol.schemas.plain import FORMATS
from kvell.engine.protocol.structured_outputs import CallForm, Calls, StructuredOutputs
from kvell.engine.sampling.grammar_process.sources import source_of
from tests.engine.sampling.byte_grammars import accepts, byte_tokenizer

TEXTS = ("", "a", "b", "xax", "ab", "1", "12", "٣", "_", "é", " ", "\u00a0", "\n", "A", "/", "-")


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"\d", {"1"}),
        (r"\d+", {"1", "12"}),
        (r"\D", {"a", "b", "٣", "_", "é", " ", "\u00a0", "\n", "A", "/", "-"}),
        (r"\w", {"a", "b", "1", "_", "A"}),
        (r"\W", {"٣", "é", " ", "\u00a0", "\n", "/", "-"}),
        (r"[\d_]", {"1", "_"}),
        ("a|b", {"a", "b"}),
        ("^a$", {"a"}),
        (r"\/", {"/"}),
        ("/", {"/"}),
        (r"\x41|\-", {"A", "-"}),
        (r"a\Z", {"a"}),
    ],
)
def test_a_pattern_has_one_meaning_wherever_it_stands(pattern: str, matched: set[str]) -> None:
    bounded = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
    slashed = pattern if "\\/" in pattern else pattern.replace("/", "\\/")
    named = {"type": "object", "patternProperties": {f"^(?:{pattern})$": {"const": 1}}}
    for made, written in (
        (StructuredOutputs(regex=pattern), str),
        (StructuredOutputs(grammar=f"start: /{slashed}/"), str),
        (StructuredOutputs(json=bounded), written_as_json),
        (StructuredOutputs(json=json.dumps(named)), lambda text: f"{{{written_as_json(text)}: 1}}"),
    ):
        assert {text for text in TEXTS if accepts(made, written(text))} == matched


def test_spaces_of_a_schema_are_those_of_ecma_262_and_others_are_ascii() -> None:
    schema = StructuredOutputs(json='{"type": "string", "pattern": "^\\\\s$"}')
    spaces = {text for text in TEXTS if accepts(schema, written_as_json(text))}
    assert spaces == {" ", "\n", "\u00a0"}
    for made in (StructuredOutputs(regex=r"\s"), StructuredOutputs(grammar=r"start: /\s/")):
        assert {text for text in TEXTS if accepts(made, text)} == {" ", "\n"}


def written_as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def test_the_pattern_of_a_schema_is_found_anywhere_and_a_regex_is_the_whole() -> None:
    searched = StructuredOutputs(json='{"type": "string", "pattern": "a"}')
    assert [text for text in TEXTS if accepts(searched, written_as_json(text))] == [
        "a",
        "xax",
        "ab",
    ]
    assert [text for text in TEXTS if accepts(StructuredOutputs(regex="a"), text)] == ["a"]


OPEN = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": True}


def test_a_named_property_does_not_come_again_in_another_spelling() -> None:
    asked = StructuredOutputs(json=json.dumps(OPEN))
    assert accepts(asked, '{"name": "x", "other": 1}')
    assert not accepts(asked, '{"name": "x", "name": 1}')
    assert not accepts(asked, '{"name": "x", "n\\u0061me": 1}')
    assert not accepts(asked, '{"name": "x", "\\u006e\\u0061me": 1}')


@pytest.mark.parametrize("value", ["a\u0001b", "\x7f", 'é"\\/\n\t', "🙂"])
def test_a_constant_can_be_written_whatever_it_holds(value: str) -> None:
    asked = StructuredOutputs(json=json.dumps({"const": value}))
    assert accepts(asked, written_as_json(value).replace("\x7f", "\\u007f"))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_followed_are_those_of_llguidance(name: str) -> None:
    made = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    assert LLMatcher.validate_grammar(made, byte_tokenizer()) == ""
    asked = StructuredOutputs(json=json.dumps({"type": "string", "format": name}))
    assert source_of(asked, byte_tokenizer()).unfollowed == ()
    assert not accepts(asked, '"no such thing!"')


@pytest.mark.parametrize("name", ["path", "url", "binary", "byte", "password", "phone", "uri-like"])
def test_other_formats_only_annotate(name: str) -> None:
    asked = StructuredOutputs(json=json.dumps({"type": "string", "format": name}))
    assert source_of(asked, byte_tokenizer()).unfollowed == ("format",)
    assert accepts(asked, '"no such thing!"')


SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'
ARGUMENTS = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
TAGGED = Calls(
    (
        CallForm('<call>\n{"name": "f", "arguments": ', ARGUMENTS, "}\n</call>"),
        CallForm("[g("),
    ),
    "\n",
)
CALL = '<call>\n{"name": "f", "arguments": {"a": 1}}\n</call>'


@pytest.mark.parametrize("tags", [(), ("<call>", "</call>")])
@pytest.mark.parametrize("constraint", [{"json": SCHEMA}, {"json_object": True}])
def test_an_answer_follows_the_schema_or_is_calls(constraint: Any, tags: tuple[str, ...]) -> None:
    asked = StructuredOutputs(**constraint, calls=TAGGED)
    fitting = ['{"name": "f"}', "{}", CALL, f"{CALL}\n{CALL}", "[g(1, [x", f"{CALL}\n[g("]
    others = ["", "text", CALL.replace("1", '"x"'), f"{CALL} x", "[h(", '{"name": "f"}\n' + CALL]
    assert [text for text in fitting if not accepts(asked, text, tags)] == []
    assert [text for text in others if accepts(asked, text, tags)] == []
    single = StructuredOutputs(**constraint, calls=Calls(TAGGED.forms, "\n", repeats=False))
    assert accepts(single, CALL, tags)
    assert not accepts(single, f"{CALL}\n{CALL}", tags)


def test_what_calls_do_not_follow_is_named_too() -> None:
    form = CallForm("<call>", '{"type": "string", "format": "path", "not": {"const": ""}}')
    asked = StructuredOutputs(json='{"type": "string", "format": "byte"}', calls=Calls((form,)))
    assert source_of(asked, byte_tokenizer()).unfollowed == ("format", "not")
