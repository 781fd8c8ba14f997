"""Grammars in EBNF mean what their notation says."""

import pytest
from llguidance._lib import LLMatcher

from kvell.engine.protocol.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputs
from kvell.engine.sampling.grammar_process.limits import bounded_seconds
from kvell.engine.sampling.grammar_process.sources import ebnf_lark, is_ebnf
from kvell.engine.sampling.grammars import Grammars
from kvell.errors import ChangeSomething
from tests.engine.sampling.byte_grammars import accepts

SQL = """
    # a query
    root ::= query
    query ::= "SELECT " column " from " table
              | "COUNT " table   # a line of its own
    column ::= "one" | "two"
    table ::= "cats" | "dogs"
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "matched", "others"),
    [
        (SQL, ["SELECT one from cats", "COUNT dogs"], ["SELECT one", "COUNT one"]),
        (JSON, ['{"a": [1, -2.5e3, {"b": "\\n\\u00e9"}]}', "{}"], ["[1]", '{"a": }']),
        ('root ::= "caf\\u00e9" | "\\x41\\n" | "é"', ["café", "A\n", "é"], ["cafe", "a"]),
        (r"root ::= [a\-c] [^\]x] [\^+--]", ["-]^".replace("]", "y"), "azq"[:2] + ","], ["b]^"]),
        ('root ::= name "s"\nname ::= [a-z]+', ["cats", "ss"], ["cat", "s"]),
        ('root ::= [0-9]{2,3} "x"?', ["12", "123x"], ["1", "1234"]),
        ('root ::= "(" root ")" | "a"', ["a", "((a))"], ["((a)", ""]),
        ('first-rule ::= "a/b"\nroot ::= first-rule "\\"" "\\\\"', ['a/b"\\'], ["a/b"]),
        ('root ::= ("#" | "[") "|" root-other\nroot-other ::= "r"', ["#|r", "[|r"], ["#r"]),
        ('root ::= "\\x01a" [\\x02]', ["\x01a\x02"], ["a\x02"]),
        ('\n// of xgrammar\nroot ::=\n  "a"', ["a"], ["b"]),
    ],
)
def test_a_grammar_matches(grammar: str, matched: list[str], others: list[str]) -> None:
    asked = StructuredOutputs(grammar=grammar)
    assert is_ebnf(grammar)
    assert [text for text in matched if not accepts(asked, text)] == []
    assert [text for text in others if accepts(asked, text)] == []


@pytest.mark.parametrize(
    "grammar", ['start: "a"', "%llguidance {}\nstart: /a/", '// x ::= y\nstart: "::="', ""]
)
def test_other_grammars_are_no_ebnf(grammar: str) -> None:
    assert not is_ebnf(grammar)


@pytest.mark.parametrize(
    ("grammar", "line"),
    [
        ('root ::= b\nb ::= "a', 'line 2: "a has no end'),
        ("root ::= nowhere", "Rule 'nowhere' not found"),
        ('other ::= "a"', "Rule 'root' not found"),
        ('root ::= "a" )\nb ::= "c"', "Expected name at line 1"),
        (r'root ::= "\q"', r"\q is not an escape"),
        ('root ::= "a"{2', "line 2"),
        ("root ::= [a", "line 1: [a has no end"),
        ('root ::= "\\uD800"', "is not a character"),
        ("root ::= " + "(" * 5000 + '"a"', "nested too deeply"),
    ],
)
def test_a_mistake_has_the_line_of_the_converter(
    grammars: Grammars, grammar: str, line: str
) -> None:
    with pytest.raises(ChangeSomething) as caught:
        grammars.check(StructuredOutputs(grammar=grammar))
    assert line in str(caught.value)
    assert caught.value.field == "structured_outputs.grammar"
    assert "kvell-whole" not in str(caught.value)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(8000)) + 'a8000 ::= "x"',
        "root ::= " + '"a" ' * 30_000,
    ],
)
def test_a_long_grammar_is_answered(grammars: Grammars, grammar: str) -> None:
    assert len(grammar) <= MAX_GRAMMAR_CHARS
    asked = StructuredOutputs(grammar=grammar)
    try:
        grammars.check(asked)
    except ChangeSomething as refused:
        assert "too complex" in str(refused) or "cannot be followed" in str(refused)


@pytest.mark.parametrize("filler", ["\n", " ", "[", '"', "\\", "#", "a", "|", "(", "\n#"])
def test_conversion_of_any_text_is_bounded(filler: str) -> None:
    text = "root ::= " + filler * (MAX_GRAMMAR_CHARS // len(filler) - 9)
    with bounded_seconds(20):  # ends the process: a pattern that backtracks takes hours
        try:
            lark = ebnf_lark(text)
        except ValueError:
            return
    assert LLMatcher.grammar_from_lark(lark)
