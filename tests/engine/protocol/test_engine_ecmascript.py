"""Patterns of ECMA-262 in Rust's syntax: what they match is what an engine of ECMA-262 finds."""

import json
import re

import pytest
import regress
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance._lib import LLMatcher

from kvell.engine.protocol.schemas import ecmascript
from kvell.engine.protocol.schemas.ecmascript import MOST_NESTED, rust_pattern
from kvell.engine.protocol.schemas.patterns import ascii_classes, ascii_lark
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from tests.engine.sampling.byte_grammars import accepts, schema_accepts

PASSWORD = "^[A-Za-z0-9!@#$%^&*()_+\\-=[\\]{};':\"|,.<>/?]*$"
PARTS = (
    *(
        "a",
        "b",
        "1",
        " ",
        "/",
        "-",
        "{",
        "}",
        "]",
        "&&",
        "--",
        "~",
        "#",
        ",",
        "{2}",
        "{,2}",
        "{1,2}",
    ),
    *("[", "[^", "[^]", "[]", "[a-", "^", "$", "|", "(", "(?:", ")", "*", "+?", "?", ".", "\\"),
    *(r"\d", r"\W", r"\s", r"\S", r"\n", r"\t", r"\/", r"\-", r"\_", r"\]", r"\x61", r"\u0062"),
    *(r"\cJ", r"\0", r"[\b]", r"[\w-.]", "[[:a:]]", "[a&&b]", "[]a]", "[^[]"),
)
"""Pieces of patterns; together they are patterns of ECMA-262 or none at all."""
TEXTS = st.text("ab1 /-{}[]&~#,.:_\n\tA\u00a0\u2028é^$|", max_size=5)


@given(st.lists(st.sampled_from(PARTS), max_size=7).map("".join), st.lists(TEXTS, max_size=4))
def test_a_translated_pattern_matches_what_ecma_262_finds(pattern: str, texts: list[str]) -> None:
    written = rust_pattern(pattern)
    assume(written is not None)
    assert written is not None
    expected = regress.Regex(pattern)
    constraint = StructuredOutputs(regex=written.removeprefix("^").removesuffix("$"))
    for text in ("a", *texts):
        assert accepts(constraint, text) == (expected.find(text) is not None)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (PASSWORD, "a[]{}", "a b"),
        ("^{[a-z]+}$", "{ab}", "ab"),
        ("^[^]*$", "a\nb", None),
        ("^[^[]+$", "ab]", "a["),
        (r"^[\w-.]+$", "a-.", "a b"),
        ("^[a-z&&]+$", "a&", "A"),
        ("^[+--]+$", "+,-", "."),
        (r"^\_\@\/\-$", "_@/-", "_@/"),
        ("^a{,2}$", "a{,2}", "aa"),
        ("^a{2,}?$", "aaa", "a"),
        ("^]}$", "]}", "]"),
        ("^a|b$", "xb", "xa"),
        ("(^a$)|(^b$)", "b", "ab"),
        (r"^\p{Lu}\p{Script=Greek}$", "Aα", "aα"),
        (r"^[\uD83C-\uDBFF\uDC00-\uDFFFa]$", "a", "b"),
        (r"^\uD83D\uDE00\u{1F600}$", "😀😀", "😀"),
        (r"^[\b]$", "\b", "b"),
        (r"^\s\S$", "\ufeffa", "a\ufeff"),
        ("^(?<year>[0-9]{4})$", "2026", "26"),
        (r"\A(?P<x>a)\Z", "a", "aa"),
        ("(?i)^ab$", "Ab", "ac"),
        ("^(?s:.)$", "\n", ""),
        ("^.$", "a", "\u2028"),
    ],
)
def test_schemas_follow_patterns_of_javascript(pattern: str, good: str, bad: str | None) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert schema_accepts(schema, good)
    assert bad is None or not schema_accepts(schema, bad)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)b", "(?<!a)b", r"\bword", r"a\B", r"(a)\1", r"(?<n>a)\k<n>", "(?P<n>a)(?P=n)"),
        *("a^b", "(^|,)a", "(?m:a)", "[]", "[\ud800]", "\ud800", r"\ud800", r"[\ud800-\udbff]"),
        *("(", ")", "a)", "[a", "*", "a**", "a{2}{3}", "{2}", "a{3,2}", "[b-a]", "a\\", "[\\"),
        *(r"\p{Unheard}", r"\p{Script=Unheard}", r"\p{", r"\u{110000}", r"[\u{110000}]", r"\07"),
        *("a{4294967296}", f"a{{{'9' * 5000}}}", "(" * 200 + ")" * 200, "(?q:a)", "^*"),
    ],
)
def test_a_pattern_that_no_grammar_follows_is_left_out(pattern: str) -> None:
    assert rust_pattern(pattern) is None
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "patternProperties": {pattern: {"type": "integer"}},
        "required": ["a"],
    }
    assert schema_accepts(schema, {"a": "anything"})
    names = {"type": "object", "propertyNames": {"pattern": pattern}}
    assert schema_accepts(names, {"anything": 1})


def test_every_property_is_one_of_the_engine() -> None:
    named = [f"\\p{{{name}}}" for name in ecmascript.PROPERTIES]
    named += [f"\\p{{{key}={name}}}" for name in ecmascript.SCRIPTS for key in ("sc", "Script")]
    named += [f"\\p{{Script_Extensions={name}}}" for name in ecmascript.SCRIPTS]
    named += [r"\P{L}", r"\p{gc=Lu}", r"\p{General_Category=Letter}"]
    for pattern in named:
        written = rust_pattern(pattern)
        assert written is not None
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(written)) == "", pattern


def test_groups_are_nested_as_deep_as_the_engine_accepts() -> None:
    nested = f"^{'(' * MOST_NESTED}a{')' * MOST_NESTED}$"
    assert schema_accepts({"type": "string", "pattern": nested}, "a")
    assert json.dumps(rust_pattern(f"({nested})")) == "null"


LETTERS = st.text("adwsDWS_9 é٣-^", max_size=4)


@given(st.text(r"\dwsDWSab9", max_size=8), LETTERS)
def test_classes_mean_what_they_mean_in_ascii(pattern: str, text: str) -> None:
    try:
        expected = re.compile(pattern, re.ASCII)
    except re.error:
        return
    found = re.compile(ascii_classes(pattern), re.ASCII)
    assert bool(found.fullmatch(text)) == bool(expected.fullmatch(text))


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"\\d\d", r"\\d[0-9]"),
        (r"[\d_]\W", r"[[0-9]_][^0-9A-Za-z_]"),
        (r"a\Z", r"a\z"),
        (r"\p{L}\.", r"\p{L}\."),
    ],
)
def test_only_classes_are_written_out(pattern: str, written: str) -> None:
    assert ascii_classes(pattern) == written


def test_in_a_grammar_only_patterns_change() -> None:
    grammar = 'start: "\\d" /\\d\\/\\d/i // \\d /\\d/\n# /\\d/\nb: "a/" /\\w/ "\\"/" a'
    written = grammar.replace("/\\d\\/\\d/i", "/[0-9]\\/[0-9]/i").replace("/\\w/", "/[0-9A-Za-z_]/")
    assert ascii_lark(grammar) == written
