"""Patterns: classes written out, and grammars in Lark's syntax."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.schemas.patterns import ascii_classes, ascii_lark

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
