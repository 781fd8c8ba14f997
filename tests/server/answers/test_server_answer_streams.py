"""How soon a stream shows what, and whole conversations token by token."""

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
from kvell.server.answers.named import parser_named
from tests.server.answers.answer_texts import TOOLS

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
