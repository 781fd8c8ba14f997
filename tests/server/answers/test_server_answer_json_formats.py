"""Calls in JSON: Hermes's, Llama's and Mistral's."""

from typing import Any

import pytest

from kvell.server.answers.deltas import Content, ToolCall, ToolCallArguments, ToolCallBegin
from kvell.server.answers.named import parser_named
from tests.server.answers.answer_texts import TOOLS, calls, read

CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
BERN = ("weather", {"city": "Bern"})


def test_hermes_has_text_calls_and_text() -> None:
    text = f"Sure.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n\nDone. "
    answer = read("hermes", text)
    assert answer.content == "Sure.\n\nDone. "
    assert calls(answer) == [BERN, BERN]


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"city": "Bern"}, "name": "weather"}',
        '{"id": "call_1", "type": "function", "name": "weather", "arguments": {"city": "Bern"}}',
        '{"name": "weather", "arguments": {"city": "Bern"}, "id": "x"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}',
        '{"name": "weather", "parameters": {"city": "Bern"}}',
        '{"n": {"name": 1}, "name": "weather", "arguments": {"city": "Bern"}}',
        '{"name": "\\u0077eather", "arguments": {"city": "Bern"}}',
        '\r\n\t {"name" :"weather" ,\n"arguments": {"city": "Bern"}\n}\n',
    ],
)
def test_hermes_reads_calls_however_they_are_written(text: str) -> None:
    answer = read("hermes", f"<tool_call>{text}</tool_call>")
    assert (calls(answer), answer.content) == ([BERN], "")


@pytest.mark.parametrize("arguments", ["{}", "null"])
def test_a_call_may_have_no_arguments(arguments: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", text).calls == (ToolCall("now", "{}"),)


def test_the_text_of_arguments_is_kept_as_it_was_written() -> None:
    arguments = '{ "a":1.50,\n "b":"\\u00e9 é \\" } ] </tool_call> <tool_call>", "c":[[{}]] }'
    answer = read("hermes", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert answer.calls == (ToolCall("f", arguments),)
    assert answer.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>not JSON</tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a\\nb", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": ' + "9" * 5000 + '}, "name": "f"}</tool_call>',
        f'<tool_call>{{"name": "{"f" * 300}", "arguments": {{}}}}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '<tool_call>{"name": f, "arguments": <x>}</tool_call>',
        '<tool_call>{"name": "f", "argume',
        "  <tool_cal",
        "a < b, <tool_calls>",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    answer = read("hermes", f"Hi {text}")
    assert (answer.content, answer.calls) == (f"Hi {text}", ())


def test_a_call_behind_a_broken_one_is_found() -> None:
    answer = read("hermes", f"<tool_call>oh <tool_call>{CALL}</tool_call>")
    assert (answer.content, calls(answer)) == ("<tool_call>oh", [BERN])


def test_an_answer_cut_off_in_arguments_keeps_what_came() -> None:
    answer = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": "xy')
    assert (answer.content, answer.calls) == ("", (ToolCall("f", '{"a": "xy'),))


def test_a_missing_brace_is_forgiven() -> None:
    answer = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>ok')
    assert (answer.content, answer.calls) == ("ok", (ToolCall("f", '{"a": 1}'),))


def test_what_is_odd_behind_arguments_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>'
    answer = read("hermes", text)
    assert (answer.content, answer.calls) == (", oops}", (ToolCall("f", '{"a": 1}'),))


def test_arguments_that_break_end_there() -> None:
    answer = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": ]}</tool_call> x')
    assert answer.calls == (ToolCall("f", '{"a": '),)
    assert answer.content == "]}</tool_call> x"


def test_text_and_arguments_are_given_as_soon_as_they_are_certain() -> None:
    parser = parser_named("hermes", "none").parser(TOOLS)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" world <too") == [Content(" world")]
    assert parser.push("ls>") == [Content(" <tools>")]
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    begin = [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"a": "')]
    assert parser.push('{"a": "') == begin
    assert parser.push("x}y") == [ToolCallArguments(0, "x}y")]
    assert parser.push('"}}') == [ToolCallArguments(0, '"}')]
    assert parser.push("\n</tool_call>\n") == []
    assert parser.finish() == []


def test_llama_writes_calls_and_nothing_else() -> None:
    text = '{"name": "weather", "parameters": {"city": "Bern"}}'
    for answer in (read("llama3_json", text), read("llama3_json", f"<|python_tag|>{text}")):
        assert (calls(answer), answer.content) == ([BERN], "")
    several = f" {text} ; {text};{text.replace('Bern', 'Basel')}\n"
    expected = [BERN, BERN, ("weather", {"city": "Basel"})]
    assert calls(read("llama3_json", several)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        'It is {"name": "f", "parameters": {}}',
        '{"name": "Bob", "age": 7}',
        '{"name": "Bob"',
        "<|python_tag|>print(1)",
        "<|python_",
        '[{"name": "f", "parameters": {}}]',
    ],
)
def test_llama_answers_that_are_no_calls_are_content(text: str) -> None:
    answer = read("llama3_json", text)
    assert (answer.content, answer.calls) == (text, ())


def test_text_behind_llamas_calls_is_content() -> None:
    answer = read("llama3_json", '{"name": "f", "parameters": {}}; and {"name": "g"}')
    assert answer.calls == (ToolCall("f", "{}"),)
    assert answer.content == '; and {"name": "g"}'


def test_mistral_writes_a_list() -> None:
    answer = read("mistral", f'Hm [TOOL_CALLS] [{CALL}, {{"name": "f", "arguments": {{}}}}] ok')
    assert (calls(answer), answer.content) == ([BERN, ("f", {})], "Hm ok")


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]weather{"city": "Bern"}',
        '[TOOL_CALLS] weather {"city": "Bern"}',
        '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}',
        '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Bern"}\n',
    ],
)
def test_mistral_writes_names_before_arguments(text: str) -> None:
    answer = read("mistral", text + text)
    assert (calls(answer), answer.content) == ([BERN, BERN], "")


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [1, 2]",
        "[TOOL_CALLS] what{",
        "[TOOL_CALLS]Zürich{}",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[OTHER]{}",
        '[TOOL_CALLS] [{"name": "f"}, {"name": "g"}]',
        "[TOOL_CAL",
        "[TOOL_CALLS] so what[",
    ],
)
def test_what_mistral_breaks_is_content(text: str) -> None:
    if text == "[TOOL_CALLS] what{":
        assert read("mistral", text).calls == (ToolCall("what", "{"),)
    else:
        answer = read("mistral", f"Hi {text}")
        assert (answer.content, answer.calls) == (f"Hi {text}", ())


def test_a_second_call_that_breaks_is_content() -> None:
    answer = read("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": 5}}] x')
    assert (calls(answer), answer.content) == ([BERN], ', {"name": 5}] x')


def first_deltas() -> list[Any]:
    return parser_named("mistral", "none").parser(TOOLS).push('[TOOL_CALLS]f{"a": ')


def test_mistrals_arguments_are_streamed() -> None:
    assert first_deltas() == [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"a": ')]
