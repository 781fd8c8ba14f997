"""Patterns: classes written out, grammars in Lark's syntax, and what no grammar can follow."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.schemas.patterns import ascii_classes, ascii_lark, looks_around

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


@pytest.mark.parametrize(
    ("pattern", "looks"),
    [
        ("(?=a)b", True),
        ("(?<!a)b", True),
        (r"\bword", True),
        (r"(a)\1", True),
        ("(?P<n>a)(?P=n)", True),
        (r"\(?=a", False),
        (r"\\b", False),
        ("(?:a)(?P<n>b)(?i:c)", False),
    ],
)
def test_patterns_that_look_around_are_known(pattern: str, looks: bool) -> None:
    assert looks_around(pattern) is looks
