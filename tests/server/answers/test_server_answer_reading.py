"""What all formats are read with: brackets, markers, JSON, values by schema."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.answers.deltas import AnswerDelta, Content, Reasoning, merge
from kvell.server.answers.reading.json_calls import (
    PYTHON,
    ArgumentsObject,
    BracketSpan,
    CallObject,
    is_name,
)
from kvell.server.answers.reading.markers import Expect, TextUntil, possible_start
from kvell.server.answers.reading.modes import Blank, Mode, ModeParser, PlainText, Say
from kvell.server.answers.reading.schema_values import TEXT, parameter_types, value_text
from kvell.server.answers.reading.tags import TagName, Value
from kvell.server.api.routes.chat import ReasoningCount
from kvell.wire.json_text import DEEPEST, read_json, write_json
from tests.server.answers.answer_texts import TOOLS, cut

CUTS = st.lists(st.integers(0, 1000), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


def scanned(span: BracketSpan, pieces: list[str], down_to: int = 0) -> int:
    """How many characters a span took of a text in pieces."""
    taken = 0
    for piece in pieces:
        end = span.scan(piece, down_to)
        taken += end
        if end < len(piece) or span.ended:
            break
    return taken


@given(OBJECTS, st.sampled_from([None, 1]), st.text('{}[]"\\ a', max_size=5), CUTS)
def test_an_object_ends_at_its_last_brace(
    value: dict[str, Any], indent: int | None, behind: str, cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    span = BracketSpan()
    assert scanned(span, cut(text + behind, cuts)) == len(text)
    assert (span.closed, span.broken, span.depth) == (True, False, 0)


@given(st.text('{}[]":,\\a1 ', max_size=20), CUTS)
def test_a_span_stops_at_the_same_place_however_its_text_is_cut(text: str, cuts: list[int]) -> None:
    whole, pieces = BracketSpan(), BracketSpan()
    assert scanned(whole, [text]) == scanned(pieces, cut(text, cuts))
    assert (whole.closed, whole.broken, whole.depth, whole.deepest) == (
        pieces.closed,
        pieces.broken,
        pieces.depth,
        pieces.deepest,
    )


@given(st.text('{}[]":,\\a1 ', max_size=20))
def test_what_json_reads_closes(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        return
    if isinstance(value, dict):
        span = BracketSpan()
        assert scanned(span, [text.rstrip(" ")]) == len(text.rstrip(" ")) and span.closed


@pytest.mark.parametrize(
    ("text", "taken", "broken"),
    [
        ("", 0, False),
        (" \n", 2, False),
        ("x", 0, True),
        ("  [1]", 2, True),
        ('{"a": ]', 6, True),
        ("{<tag>", 1, True),
        ("{'a': 1}", 1, True),
        ('{"<\'>]": -1.5e+3, "b": [true]} more', 30, False),
        ('{"\\"}": 1', 9, False),
        ("{é", 1, True),
    ],
)
def test_a_span_stops_before_what_cannot_be_json(text: str, taken: int, broken: bool) -> None:
    span = BracketSpan()
    assert (scanned(span, [text]), span.broken) == (taken, broken)


def test_a_span_can_stop_at_an_inner_bracket() -> None:
    span = BracketSpan(opened="}")
    assert span.scan('{"a": {}}, "b": 1}', down_to=1) == 9
    assert (span.depth, span.ended) == (1, False)
    assert span.scan(', "b": 1} x') == 9
    assert span.closed


def test_python_has_other_brackets_and_quotes() -> None:
    span = BracketSpan(PYTHON, first="(")
    call = ["(a=')\\'\"', ", 'b="]\'", c={"x": [(1,)]})']
    assert scanned(span, [*call, " + 1"]) == len("".join(call))
    assert span.closed and span.deepest == 4


@given(VALUES)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    try:
        text = write_json(value)
    except ValueError:
        return
    assert text.encode()
    assert read_json(text) == value == json.loads(text)


def test_lone_surrogates_are_written_as_escapes() -> None:
    assert write_json("é\ud800") == '"\\u00e9\\ud800"'
    assert write_json("é😀") == '"é😀"'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_numbers_without_json_are_not_written(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(value)


def test_json_is_read_to_a_depth() -> None:
    assert read_json("[" * DEEPEST + "]" * DEEPEST)
    assert read_json('["a\nb"]') == ["a\nb"]
    for deep in (DEEPEST + 1, 100_000):
        with pytest.raises(ValueError, match="too deep"):
            read_json("[" * deep + "]" * deep)


@pytest.mark.parametrize("text", ["", "NaN", "[Infinity]", "{", "{} x", "[}", "9" * 5000, "nul"])
def test_what_is_no_json_is_not_read(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)


MARKERS = ("<a>", "<ab>", "[b]")


@pytest.mark.parametrize(
    ("text", "start"),
    [("", 0), ("x", 1), ("x<", 1), ("<a", 0), ("<ab", 0), ("<abc", 4), ("<a<", 2), ("[b", 0)],
)
def test_what_may_become_a_marker_is_found(text: str, start: int) -> None:
    assert possible_start(text, MARKERS) == start


def run(mode: Mode, pieces: list[str]) -> tuple[list[AnswerDelta], str | None]:
    """A mode's deltas, and what it left of its text; None if it was not over."""
    deltas: list[AnswerDelta] = []
    for i, piece in enumerate(pieces):
        new, rest = mode.push(piece)
        deltas += new
        if rest is not None:
            return merge(deltas), rest + "".join(pieces[i + 1 :])
    return merge([*deltas, *mode.finish()]), None


@given(st.text("<>ab[] \n", max_size=16), CUTS, st.booleans(), st.booleans())
def test_text_ends_at_the_first_marker(
    text: str, cuts: list[int], drops_lead: bool, drops_blank: bool
) -> None:
    mode = TextUntil(MARKERS, drops_lead=drops_lead, drops_blank=drops_blank)
    deltas, rest = run(mode, cut(text, cuts))
    starts = [(text.index(marker), marker) for marker in MARKERS if marker in text]
    if not starts:
        assert rest is None
        shown = text.lstrip(" \n") if drops_lead else text
        dropped = drops_blank and not text.strip(" \n")
        assert deltas == ([Content(shown)] if shown and not dropped else [])
        return
    start, marker = min(starts)
    before = text[:start]
    shown = before.strip(" \n") if drops_lead else before.rstrip(" \n")
    assert deltas == ([Content(shown)] if shown.strip(" \n") else [])
    assert (mode.marker, rest) == (marker, text[start + len(marker) :])
    assert mode.opening == before[len(before.rstrip(" \n")) :] + marker


@given(st.text("<>ab[] \n", max_size=10), CUTS)
def test_a_marker_that_is_expected_comes_or_nothing_is_taken(text: str, cuts: list[int]) -> None:
    mode = Expect(*MARKERS, before="…", make=Reasoning)
    deltas, rest = run(mode, cut(text, cuts))
    body = text.lstrip(" \n")
    found = [marker for marker in MARKERS if body.startswith(marker)]
    if found:
        assert (deltas, rest, mode.marker) == ([], body[len(found[0]) :], found[0])
        assert mode.opening == "…" + text[: len(text) - len(body)] + found[0]
    elif any(marker.startswith(body) for marker in MARKERS):
        assert (deltas, rest) == ([Reasoning("…" + text)], None)
    else:
        assert (deltas, rest, mode.marker) == ([], text, "")


def test_whitespace_alone_is_shown_where_it_should_be() -> None:
    assert run(Expect("<a>"), [" "]) == ([], None)
    assert run(Expect("<a>", keeps_blank=True), [" "]) == ([Content(" ")], None)
    assert run(PlainText(), [" ", "x"]) == ([Content(" x")], None)
    assert run(PlainText(drops_blank=True), [" ", "\n"]) == ([], None)
    assert run(PlainText(drops_blank=True), [" ", "x", " "]) == ([Content(" x ")], None)
    assert run(Blank(), [" ", "\n x "]) == ([], "x ")
    assert run(Say(Content("x")), ["y"]) == ([Content("x")], "y")


def test_long_pushes_are_cut() -> None:
    text = "word " * 5000
    assert merge(ModeParser(PlainText()).push(text)) == [Content(text)]


@given(st.text('{}[]":,\\ naemrgutsf', max_size=24), CUTS)
def test_a_call_object_gives_back_what_is_none(text: str, cuts: list[int]) -> None:
    for mode in (CallObject(0, "<"), ArgumentsObject(0, "f", "<")):
        deltas, rest = run(mode, cut(text, cuts))
        if not mode.begun:
            shown = "".join(delta.text for delta in deltas if isinstance(delta, Content))
            assert shown + (rest or "") == "<" + text


@pytest.mark.parametrize(
    ("name", "good"),
    [("f", True), ("a.b-c_d", True), ("Zürich", True), ("", False), ("a\n", False), (None, False),
     ("x" * 256, True), ("x" * 257, False), ("\ud800", False), (7, False)],
)  # fmt: skip
def test_names_can_be_printed(name: object, good: bool) -> None:
    assert is_name(name) is good


def test_a_schema_tells_the_types() -> None:
    types = parameter_types(TOOLS, "weather")
    assert types["city"] == TEXT
    assert types["days"] == {"integer"}
    assert types["scale"] == {"number", "null"}
    assert types["note"] == {"string", "null"}
    assert types["place"] == {"object", "string"}
    assert types["kind"] == {"integer"}
    assert types["free"] == TEXT
    assert parameter_types(TOOLS, "other") == {}


@pytest.mark.parametrize("parameters", [None, {}, {"properties": 7}, {"properties": {"a": 7}}])
def test_odd_schemas_tell_nothing(parameters: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    assert parameter_types(tools, "f") in ({}, {"a": TEXT})


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("1", {"integer"}, "1"),
        ("1", {"number"}, "1"),
        ("1.0", {"integer"}, '"1.0"'),
        ("true", {"integer"}, '"true"'),
        ("True", {"boolean"}, "true"),
        ("None", {"null", "string"}, "null"),
        ("none", {"null", "string"}, '"none"'),
        ('{"a": 1}', {"object"}, '{"a": 1}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[1]", {"object"}, '"[1]"'),
        ('"x"', {"integer", "string"}, '"x"'),
    ],
)
def test_values_are_of_a_type_or_strings(text: str, types: set[str], written: str) -> None:
    assert value_text(text, frozenset(types)) == written


@given(st.text(max_size=12), CUTS)
def test_a_value_is_read_however_it_is_cut(text: str, cuts: list[int]) -> None:
    if "</parameter>" in text:
        return
    pieces = cut(f"\n{text}\n</parameter>rest", cuts)
    for types in (TEXT, frozenset({"string", "object"})):
        deltas, rest = run(Value(0, '"x": ', types), pieces)
        [delta] = deltas
        assert isinstance(delta, AnswerDelta) and rest == "rest"
        assert "text" in vars(delta)
        assert json.loads("{" + vars(delta)["text"] + "}") == {"x": text}


@pytest.mark.parametrize(
    ("text", "name", "left"),
    [("f>x", "f", "x"), ("a b>", "a b", ""), (">x", "", ">x"), ("a\nb>", "", "a\nb>"),
     ("x" * 256 + ">", "x" * 256, ""), ("x" * 300, "", "x" * 300)],
)  # fmt: skip
def test_a_tag_has_a_name_or_is_text(text: str, name: str, left: str) -> None:
    for pieces in ([text], list(text)):
        tag = TagName("<function=")
        deltas, rest = run(tag, pieces)
        assert (tag.name, rest) == (name, left)
        assert deltas == ([] if name else [Content("<function=")])


START, END = 1, 2


@pytest.mark.parametrize(
    ("output", "opened", "chosen"),
    [
        ([], 0, 0),
        ([7, 7], 2, 0),
        ([7, 7, END, 7], 2, 0),
        ([START, 7, END, 7, END], 2, 1),
        ([START, END], 1, 0),
        ([9, START, 7, 7, 7], 5, 3),
        ([END, START, 7], 0, 1),
    ],
)
def test_what_lies_between_the_tags_counts(output: list[int], opened: int, chosen: int) -> None:
    for start, tokens in ((None, opened), (START, chosen)):
        count = ReasoningCount(END, start)
        count.push(output)
        assert count.tokens == tokens


def test_a_call_ends_the_reasoning() -> None:
    count = ReasoningCount(END, START, (8,))
    count.push([START, 7, 7, 8, 7])
    assert count.tokens == 2
    count.push([END, 7])
    assert count.tokens == 4


@given(st.lists(st.integers(0, 4), max_size=20), st.sampled_from([None, START]), st.data())
def test_the_cuts_do_not_matter(output: list[int], start: int | None, data: st.DataObject) -> None:
    whole, cut = ReasoningCount(END, start), ReasoningCount(END, start)
    whole.push(output)
    place = data.draw(st.integers(0, len(output)))
    for piece in (output[:place], output[place:]):
        cut.push(piece)
    assert cut.tokens == whole.tokens
