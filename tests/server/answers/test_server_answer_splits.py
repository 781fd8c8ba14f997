"""How an answer's text is cut changes nothing, and how soon a stream shows what."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    ParsedAnswer,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    parse,
)
from kvell.server.answers.forced import NamedFunction, forced_tool_calls
from kvell.server.answers.named import TOOL_PARSERS, parser_named
from kvell.server.answers.reading.modes import ModeParser
from tests.server.answers.answer_texts import REAL, TOOLS, cut, deltas_of, texts

PAIRS = [
    *((tool, "none") for tool in TOOL_PARSERS),
    ("none", "deepseek_r1"),
    ("hermes", "deepseek_r1"),
    ("qwen3_coder", "qwen3"),
    ("mistral", "mistral"),
    ("glm45", "glm45"),
    ("deepseek_v3", "deepseek_v3"),
    ("hermes", "qwen3"),
    ("openai", "gpt_oss"),
    ("none", "gpt_oss"),
]
CUTS = st.lists(st.integers(0, 1000), max_size=8)


def check_cuts(tool: str, reasoning: str, text: str, cuts: list[int]) -> None:
    named = parser_named(tool, reasoning)
    whole = deltas_of(named.parser(TOOLS), [text])
    assert deltas_of(named.parser(TOOLS), cut(text, cuts)) == whole
    assert deltas_of(named.parser(TOOLS), list(text)) == whole


@pytest.mark.parametrize(("tool", "reasoning", "text"), REAL)
@given(CUTS)
def test_real_answers_do_not_depend_on_how_they_are_cut(
    tool: str, reasoning: str, text: str, cuts: list[int]
) -> None:
    check_cuts(tool, reasoning, text, cuts)


@pytest.mark.parametrize(("tool", "reasoning"), PAIRS)
@given(texts(), CUTS)
def test_broken_answers_do_not_depend_on_how_they_are_cut(
    tool: str, reasoning: str, text: str, cuts: list[int]
) -> None:
    check_cuts(tool, reasoning, text, cuts)


@pytest.mark.parametrize("choice", ["required", NamedFunction("f")])
@given(texts(), CUTS)
def test_forced_answers_do_not_depend_on_how_they_are_cut(
    choice: NamedFunction, text: str, cuts: list[int]
) -> None:
    parsers = []
    for _ in range(2):
        mode = forced_tool_calls(choice)
        assert mode is not None
        parsers.append(ModeParser(mode))
    assert deltas_of(parsers[0], cut(text, cuts)) == deltas_of(parsers[1], list(text))


@pytest.mark.parametrize("tool", [name for name in TOOL_PARSERS if name != "openai"])
@given(texts())
def test_text_without_a_call_is_content_to_the_last_character(tool: str, text: str) -> None:
    answer = parse(deltas_of(parser_named(tool, "none").parser(TOOLS), [text]))
    if not answer.calls:
        assert answer.content == text


@pytest.mark.parametrize(("tool", "reasoning"), PAIRS)
@given(texts())
def test_calls_are_numbered_and_begin_before_their_arguments(
    tool: str, reasoning: str, text: str
) -> None:
    begun = 0
    for delta in deltas_of(parser_named(tool, reasoning).parser(TOOLS), [text]):
        match delta:
            case ToolCallBegin(index, name):
                assert index == begun and name
                begun += 1
            case ToolCallArguments(index, piece):
                assert index == begun - 1 and piece
            case Content(piece) | Reasoning(piece):
                assert piece


@pytest.mark.parametrize("tool", ["hermes", "mistral", "qwen3_coder", "none"])
@given(st.text(max_size=50), CUTS)
def test_any_text_without_markers_is_content(tool: str, text: str, cuts: list[int]) -> None:
    if "<" in text or "[" in text:
        return
    deltas = deltas_of(parser_named(tool, "none").parser(TOOLS), cut(text, cuts))
    assert deltas == ([Content(text)] if text else [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
JSON_FORMS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": %s}]',
    "openai": "<|channel|>commentary to=functions.f<|message|>%s<|call|>",
}


@pytest.mark.parametrize("tool", JSON_FORMS)
@given(ARGUMENTS, st.booleans(), CUTS)
def test_any_arguments_come_out_as_they_were_written(
    tool: str, arguments: dict[str, object], plain: bool, cuts: list[int]
) -> None:
    written = json.dumps(arguments, ensure_ascii=plain, indent=None if plain else 1)
    if tool == "openai" and "<|" in written:
        return
    pieces = cut(JSON_FORMS[tool] % written, cuts)
    expected = [ToolCallBegin(0, "f"), ToolCallArguments(0, written)]
    assert deltas_of(parser_named(tool, "none").parser(TOOLS), pieces) == expected


@given(st.text(max_size=30), CUTS)
def test_any_string_is_the_value_of_a_tagged_parameter(value: str, cuts: list[int]) -> None:
    if "</parameter>" in value:
        return
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    answer = parse(deltas_of(parser_named("qwen3_coder", "none").parser(TOOLS), cut(text, cuts)))
    assert json.loads(answer.calls[0].arguments) == {"city": value}
    assert answer.content == ""


DEEP = 100_000
HOSTILE = {
    "open braces": "{" * DEEP,
    "closed braces": '{"a":' * DEEP + "1" + "}" * DEEP,
    "brackets": "[" * DEEP + "]" * DEEP,
    "parentheses": "[f(a=" + "(" * DEEP + ")" * DEEP + ")]",
    "minus signs": "[f(a=" + "-" * DEEP + "1)]",
    "a long sum": "[f(a=1" + "+1" * DEEP + ")]",
    "attributes": "[f" + ".f" * DEEP + "(a=1)]",
    "nots": "[f(a=" + "not " * DEEP + "1)]",
    "spaces": " " * 2 * DEEP,
    "a long digit": "9" * DEEP,
    "quotes": '"' * DEEP,
    "backslashes": '{"name": "' + "\\" * DEEP,
    "openings": "<tool_call>{" * (DEEP // 12),
    "calls in strings": '<tool_call>{"name":"f","arguments":{},"' * (DEEP // 38),
    "mistral's openings": "[TOOL_CALLS]" * (DEEP // 12),
    "mistral's names": "[TOOL_CALLS]a" * (DEEP // 13),
    "functions": "<function=" * (DEEP // 10),
    "parameters": "<function=f>" + "<parameter=" * (DEEP // 11),
    "channels": "<|channel|>" * (DEEP // 11),
    "starts": "<|start|>assistant<|message|>" * (DEEP // 29),
}
LEADS = {
    "hermes": '<tool_call>{"name": "f", "x": ',
    "llama3_json": '{"name": "f", "parameters": {"a":',
    "mistral": "[TOOL_CALLS]f{",
    "openai": "<|channel|>commentary to=functions.f<|message|>",
    "pythonic": "",
    "qwen3_coder": "<function=weather><parameter=places>",
    "none": "",
}

BY_CHARACTER = ("closed braces", "openings", "spaces", "mistral's names", "parameters")

SOON = dict(zip(LEADS, ("openings", "minus signs", "mistral's names", "starts",
                        "a long sum", "parameters", "backslashes"), strict=True))  # fmt: skip
"""Each parser with an attack on it; in the long suite, with all."""


@pytest.mark.parametrize(
    ("tool", "attack"),
    [
        pytest.param(tool, attack, marks=() if SOON[tool] == attack else pytest.mark.long)
        for tool in LEADS
        for attack in HOSTILE
    ],
)
def test_hostile_text_neither_recurses_nor_grows_costly(tool: str, attack: str) -> None:
    """What grows with the square would take hours: the suite's own timeout ends it."""
    named = parser_named(tool, "none")
    text = LEADS[tool] + HOSTILE[attack]
    whole = deltas_of(named.parser(TOOLS), [text])
    size = 1 if attack in BY_CHARACTER else 1000
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert deltas_of(named.parser(TOOLS), pieces) == whole


@pytest.mark.parametrize("tool", ["hermes", "llama3_json", "mistral"])
def test_deep_arguments_are_streamed_as_they_came(tool: str) -> None:
    deep = '{"a":' * DEEP + "1" + "}" * DEEP
    answer = parse(deltas_of(parser_named(tool, "none").parser(TOOLS), [JSON_FORMS[tool] % deep]))
    assert [(call.name, call.arguments == deep) for call in answer.calls] == [("f", True)]


def test_deep_arguments_that_would_have_to_be_read_are_content() -> None:
    deep = '<tool_call>{"arguments": ' + '{"a":' * DEEP + "1" + "}" * DEEP + ', "name": "f"}'
    answer = parse(deltas_of(parser_named("hermes", "none").parser(TOOLS), [deep]))
    assert (answer.content == deep, answer.calls) == (True, ())


MARKERS = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "none": (),
}


def streamed(tool: str, reasoning: str, pieces: list[str]) -> list[list[AnswerDelta]]:
    parser = parser_named(tool, reasoning).parser(TOOLS)
    return [*(parser.push(piece) for piece in pieces), parser.finish()]


@pytest.mark.parametrize("tool", MARKERS)
@given(st.lists(st.text("ab<>_[]tool_callTOOL_CALLS= \n", min_size=1, max_size=5), max_size=8))
def test_only_what_may_become_a_marker_is_held_back(tool: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    if any(marker in text for marker in MARKERS[tool]):
        return
    parser = parser_named(tool, "none").parser(TOOLS)
    came = shown = ""
    for piece in pieces:
        came += piece
        shown += parse(parser.push(piece)).content
        held = came[len(shown) :].lstrip(" \n")
        assert came.startswith(shown)
        assert not held or any(marker.startswith(held) for marker in MARKERS[tool])
        if tool == "none":
            assert shown == came
    assert shown + parse(parser.finish()).content == text


@given(st.lists(st.text("ab</think> \n", min_size=1, max_size=5), max_size=8))
def test_reasoning_is_held_back_no_longer_either(pieces: list[str]) -> None:
    text = "".join(pieces)
    if "</think>" in text or text.lstrip().startswith("<think>"):
        return
    parser = parser_named("none", "deepseek_r1").parser(TOOLS)
    came = "x"
    shown = parse(parser.push("x")).reasoning
    for piece in pieces:
        came += piece
        shown += parse(parser.push(piece)).reasoning
        held = came[len(shown) :].lstrip(" \n")
        assert came.startswith(shown)
        assert not held or "</think>".startswith(held)


@given(st.lists(st.text('a1{}[]" ,:', min_size=1, max_size=4), min_size=1, max_size=8))
def test_arguments_are_never_held_back(pieces: list[str]) -> None:
    parser = parser_named("hermes", "none").parser(TOOLS)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    for piece in pieces:
        string = piece.replace('"', "")
        if string:
            assert parser.push(string) == [ToolCallArguments(0, string)]
    assert parser.push('"}}</tool_call>') == [ToolCallArguments(0, '"}')]
    assert parser.finish() == []


def test_hermes_token_by_token() -> None:
    pieces = ["<think>", "\n", "Okay", ",", " the user", "\n", "</think>", "\n\n", "I", " will"]
    pieces += [" look", ".\n", "<tool_call>", "\n", '{"', "name", '":', ' "', "weather", '",', ' "']
    pieces += ["arguments", '":', ' {"', "city", '":', ' "', "Zü", "rich", '"}}', "\n"]
    pieces += ["</tool_call>"]
    deltas = streamed("hermes", "qwen3", pieces)
    assert [delta for one in deltas for delta in one] == [
        Reasoning("Okay"),
        Reasoning(","),
        Reasoning(" the user"),
        Content("I"),
        Content(" will"),
        Content(" look"),
        Content("."),
        ToolCallBegin(0, "weather"),
        ToolCallArguments(0, '{"'),
        ToolCallArguments(0, "city"),
        ToolCallArguments(0, '":'),
        ToolCallArguments(0, ' "'),
        ToolCallArguments(0, "Zü"),
        ToolCallArguments(0, "rich"),
        ToolCallArguments(0, '"}'),
    ]


def test_mistral_token_by_token() -> None:
    pieces = ["[TOOL_CALLS]", "weather", "[ARGS]", '{"', "city", '": "', "Bern", '"}']
    pieces += ["[TOOL_CALLS]", "now", "[ARGS]", "{}"]
    deltas = streamed("mistral", "none", pieces)
    assert [len(one) for one in deltas] == [0, 0, 0, 2, 1, 1, 1, 1, 0, 0, 0, 2, 0]
    calls = (ToolCall("weather", '{"city": "Bern"}'), ToolCall("now", "{}"))
    assert parse(delta for one in deltas for delta in one) == ParsedAnswer(calls=calls)


def test_qwen_coder_token_by_token() -> None:
    pieces = ["Let me", " see", ".", "\n\n", "<tool_call>", "\n", "<", "function", "=", "weather"]
    pieces += [">", "\n", "<", "parameter", "=", "city", ">", "\n", "Zü", "rich", "\n", "</"]
    pieces += ["parameter", ">", "\n", "<", "parameter", "=", "days", ">", "\n", "3", "\n", "</"]
    pieces += ["parameter", ">", "\n", "</", "function", ">", "\n", "</tool_call>"]
    deltas = [delta for one in streamed("qwen3_coder", "none", pieces) for delta in one]
    assert deltas == [
        Content("Let me"),
        Content(" see"),
        Content("."),
        ToolCallBegin(0, "weather"),
        ToolCallArguments(0, '{"city": "Zü'),
        ToolCallArguments(0, "rich"),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, ', "days": 3'),
        ToolCallArguments(0, "}"),
    ]


def test_gpt_oss_token_by_token() -> None:
    pieces = ["<|channel|>", "analysis", "<|message|>", "Need", " weather", ".", "<|end|>"]
    pieces += ["<|start|>", "assistant", "<|channel|>", "comment", "ary", " to", "=", "functions"]
    pieces += [".", "weather", " ", "<|constrain|>", "json", "<|message|>", '{"', "city", '":"']
    pieces += ["Bern", '"}']
    deltas = streamed("openai", "gpt_oss", pieces)
    assert [len(one) for one in deltas] == [0] * 3 + [1] * 3 + [0] * 14 + [1] + [1] * 5 + [0]
    expected = ParsedAnswer("", "Need weather.", (ToolCall("weather", '{"city":"Bern"}'),))
    assert parse(delta for one in deltas for delta in one) == expected


def test_llama_token_by_token() -> None:
    pieces = ["<|python_tag|>", '{"', "type", '": "', "function", '", "', "name", '": "', "weather"]
    pieces += ['", "', "parameters", '": {"', "city", '": "', "Bern", '"}}']
    deltas = streamed("llama3_json", "none", pieces)
    assert [len(one) for one in deltas] == [0] * 11 + [2, 1, 1, 1, 1, 0]
    assert deltas[11] == [ToolCallBegin(0, "weather"), ToolCallArguments(0, '{"')]


def test_python_token_by_token() -> None:
    pieces = ["[", "weather", "(", "city", '="', "Bern", '")', ",", " now", "()", "]"]
    deltas = streamed("pythonic", "none", pieces)
    assert [len(one) for one in deltas] == [0, 0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("tool", ["llama3_json", "pythonic"])
def test_an_answer_that_is_no_call_is_shown_from_its_first_word(tool: str) -> None:
    deltas = streamed(tool, "none", ["It", " rains", ".\n"])
    assert deltas == [[Content("It")], [Content(" rains")], [Content(".\n")], []]


def test_a_switched_off_thought_is_skipped_before_an_answer() -> None:
    deltas = streamed("hermes", "qwen3", ["<think>", "\n\n", "</think>", "\n\n", "Yes", "."])
    assert deltas == [[], [], [], [], [Content("Yes")], [Content(".")], []]


def test_a_parser_serves_one_answer_and_its_format_many() -> None:
    named = parser_named("hermes", "qwen3")
    first, second = named.parser(TOOLS), named.parser(TOOLS)
    assert first.push("<think>a") == [Reasoning("a")]
    assert second.push("b") == [Content("b")]
    assert first.push("c") == [Reasoning("c")]
