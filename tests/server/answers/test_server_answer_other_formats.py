"""Calls that are not JSON: tags, Python, gpt-oss's channels; and reasoning."""

import pytest

from kvell.server.answers.deltas import (
    Content,
    ParsedAnswer,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
)
from kvell.server.answers.named import parser_named
from tests.server.answers.answer_texts import TOOLS, calls, read


def tagged(*parameters: tuple[str, str], name: str = "weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def value_of(parameter: str, value: str) -> object:
    [(_, arguments)] = calls(read("qwen3_coder", tagged((parameter, value))))
    return arguments[parameter]


def test_qwen_writes_tags() -> None:
    text = f"Ok.\n\n{tagged(('city', 'Bern'), ('days', '3'))}\n{tagged(name='now')}\n"
    answer = read("qwen3_coder", text)
    assert answer.content == "Ok."
    assert calls(answer) == [("weather", {"city": "Bern", "days": 3}), ("now", {})]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("city", "", ""),
        ("city", "\n", "\n"),
        ("city", '  "x"\\ \t é😀\nif a < b:\n', '  "x"\\ \t é😀\nif a < b:\n'),
        ("city", "<parameter=x></function>", "<parameter=x></function>"),
        ("days", "12", 12),
        ("days", " 12 ", 12),
        ("days", "1.5", "1.5"),
        ("days", "many", "many"),
        ("days", "9" * 5000, "9" * 5000),
        ("scale", "1.5", 1.5),
        ("scale", "2", 2),
        ("scale", "None", None),
        ("scale", "NaN", "NaN"),
        ("scale", "1e999", "1e999"),
        ("metric", "True", True),
        ("metric", "false", False),
        ("metric", "1", "1"),
        ("places", '["a",\n"b"]', ["a", "b"]),
        ("places", "[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
        ("places", "[1", "[1"),
        ("note", "null", None),
        ("note", "7", "7"),
        ("place", '{"x": 1}', {"x": 1}),
        ("place", "home", "home"),
        ("kind", "2", 2),
        ("free", "2", "2"),
        ("unheard_of", "2", "2"),
    ],
)
def test_values_are_read_as_the_schema_says(parameter: str, text: str, value: object) -> None:
    assert value_of(parameter, text) == value


def test_strings_are_streamed_and_other_values_are_not() -> None:
    parser = parser_named("qwen3_coder", "none").parser(TOOLS)
    assert parser.push("<tool_call>\n<function=weather>") == [ToolCallBegin(0, "weather")]
    assert parser.push("<parameter=city>\nBe") == [ToolCallArguments(0, '{"city": "Be')]
    assert parser.push('"\n') == [ToolCallArguments(0, '\\"')]
    assert parser.push("rn\n</para") == [ToolCallArguments(0, "\\nrn")]
    assert parser.push("meter>\n<parameter=days>1") == [ToolCallArguments(0, '"')]
    assert parser.push("2</parameter>") == [ToolCallArguments(0, ', "days": 12')]
    assert parser.push("</function>") == [ToolCallArguments(0, "}")]
    assert parser.push("\n</tool_call>\n") == parser.finish() == []


@pytest.mark.parametrize(
    "text",
    [
        "<function=weather><parameter=city>Bern</parameter></function>",
        "<tool_call><function=weather><parameter=city>Bern</parameter></tool_call>",
        "<tool_call><function=weather><parameter=city>\nBern</parameter></function>",
    ],
)
def test_tags_that_are_missing_are_forgiven(text: str) -> None:
    answer = read("qwen3_coder", text)
    assert (calls(answer), answer.content) == ([("weather", {"city": "Bern"})], "")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>\n",
        "<tool_call>\n<func",
        "<function=>",
        "<function=a\nb></function>",
        f"<function={'a' * 300}></function>",
        "<function=f",
        "</function></tool_call>",
    ],
)
def test_what_is_no_tagged_call_is_content(text: str) -> None:
    answer = read("qwen3_coder", f"Hi {text}")
    assert (answer.content.rstrip(), answer.calls) == (f"Hi {text}".rstrip(), ())


def test_text_in_a_call_is_content() -> None:
    answer = read("qwen3_coder", "<function=f>so <parameter=>x</function> and")
    assert answer == ParsedAnswer("so <parameter=>x and", "", (ToolCall("f", "{}"),))


@pytest.mark.parametrize("end", ["", "\n", "\n</param"])
def test_a_value_that_is_cut_off_is_kept(end: str) -> None:
    answer = read("qwen3_coder", f"<function=weather><parameter=city>\nBer{end}")
    assert answer.calls[0].arguments.startswith('{"city": "Ber')
    answer = read("qwen3_coder", f"<function=weather><parameter=days>\n12{end.strip()}")
    assert answer.calls[0].arguments.startswith('{"days": ')


def test_calls_are_written_in_python() -> None:
    text = """[weather(city="B'n)]", days=-3), a.b(x={'k': [1, 2.5, (True, None)]}, y=null), f()]"""
    expected = [
        ("weather", {"city": "B'n)]", "days": -3}),
        ("a.b", {"x": {"k": [1, 2.5, [True, None]]}, "y": None}),
        ("f", {}),
    ]
    for written in (text, f" {text}\n", f"<|python_start|>{text}<|python_end|>"):
        answer = read("pythonic", written)
        assert (calls(answer), answer.content) == (expected, "")


@pytest.mark.parametrize(
    "call",
    [
        "f(1)", "f(**x)", "f(*x)", "f(a=b)", "f(a=g())", "f(a=__import__('os'))", "f(a=1+1)",
        "f(a=b'x')", "f(a=1j)", "f(a=...)", "f(a=f'{x}')", "f(a={1: 2})", "f(a={**b})", "f(a=x.y)",
        "f(a=lambda: 1)", "f(a=[x for x in y])", "f(a=1e999)", "f(a=-'x')", "f(a=)", "f(a", "f",
        "f()()", "f(a='\n')", "f(a=(]))", "1", "'f'", "f(\0)", "é()", f"f(a={'9' * 5000})",
        f"f(a={'[' * 70}{']' * 70})",
    ],
)  # fmt: skip
def test_python_that_is_more_than_literals_is_content(call: str) -> None:
    answer = read("pythonic", f"[{call}]")
    if call != "f()()":
        assert (answer.content, answer.calls) == (f"[{call}]", ())
    else:
        assert (answer.content, answer.calls) == ("()]", (ToolCall("f", "{}"),))


@pytest.mark.parametrize("text", ["", " ", "Hi [f(a=1)]", "<|python_start|>x", "<|python_sta", "["])
def test_answers_that_do_not_begin_with_a_python_call_are_content(text: str) -> None:
    answer = read("pythonic", text)
    assert (answer.content, answer.calls) == (text, ())


def test_a_python_call_is_given_when_it_is_whole() -> None:
    parser = parser_named("pythonic", "none").parser(TOOLS)
    assert parser.push("[f(a=1") == []
    assert parser.push(")") == [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"a": 1}')]
    assert parser.push(", g(x)] ok") == [Content(", g(x)"), Content("] ok")]


CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s<|call|>"
HARMONY = [
    ("<|channel|>final<|message|>It rains.<|return|>", ParsedAnswer("It rains.")),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ok",
        ParsedAnswer("Ok", "Hm."),
    ),
    (CALL % '{"city": "Bern"}', ParsedAnswer(calls=(ToolCall("weather", '{"city": "Bern"}'),))),
    (CALL % "", ParsedAnswer(calls=(ToolCall("weather", "{}"),))),
    (
        " to=functions.f<|channel|>commentary<|message|>{}",
        ParsedAnswer(calls=(ToolCall("f", "{}"),)),
    ),
    (
        f"{CALL % '{}'}<|start|>assistant{CALL % '{}'}",
        ParsedAnswer(calls=(ToolCall("weather", "{}"),) * 2),
    ),
    (
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant" + CALL % "{}",
        ParsedAnswer("I will look.", "", (ToolCall("weather", "{}"),)),
    ),
    ("<|channel|>analysis to=python<|message|>1<|call|>", ParsedAnswer("", "1")),
    ("<|message|>Plain.", ParsedAnswer("Plain.")),
    ("Plain text", ParsedAnswer("Plain text")),
    ("to=5 is text", ParsedAnswer("to=5 is text")),
    ("<|channel|>analy", ParsedAnswer("<|channel|>analy")),
    ("<|channel|>final<|end|>x", ParsedAnswer("<|channel|>final<|end|>x")),
    ("<|channel|>" + "x" * 600 + "<|message|>y", ParsedAnswer("<|channel|>" + "x" * 600 + "y")),
]


@pytest.mark.parametrize(("text", "answer"), HARMONY)
def test_gpt_oss_writes_channels(text: str, answer: ParsedAnswer) -> None:
    assert read("openai", text, "gpt_oss") == answer


def test_channels_that_nobody_asked_for_are_content() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|>" + CALL % "{}"
    assert read("openai", text, "none") == ParsedAnswer("Hm.", "", (ToolCall("weather", "{}"),))
    assert read("none", text, "gpt_oss") == ParsedAnswer("{}", "Hm.")


def test_gpt_oss_is_streamed() -> None:
    parser = parser_named("openai", "gpt_oss").parser(TOOLS)
    assert parser.push("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert parser.push(" so<|en") == [Reasoning(" so")]
    assert parser.push("d|><|start|>assistant") == []
    assert parser.push(CALL.partition("%s")[0]) == [ToolCallBegin(0, "weather")]
    assert parser.push('{"a": ') == [ToolCallArguments(0, '{"a":')]
    assert parser.push("1}") == [ToolCallArguments(0, " 1}")]
    assert parser.finish() == []


THOUGHT = [
    ("deepseek_r1", None, "Hm.\n</think>\n\nOk", ParsedAnswer("Ok", "Hm.")),
    ("deepseek_r1", None, "<think>\nHm.\n</think>\n\nOk", ParsedAnswer("Ok", "Hm.")),
    ("deepseek_r1", None, "Hm. Never ends", ParsedAnswer("", "Hm. Never ends")),
    ("deepseek_r1", None, "<thi", ParsedAnswer("", "<thi")),
    ("deepseek_r1", "…<think></think>", "Ok", ParsedAnswer("Ok")),
    ("deepseek_r1", None, "</think>Ok", ParsedAnswer("Ok")),
    ("qwen3", None, "<think>\nHm.\n</think>\n\nOk ", ParsedAnswer("Ok ", "Hm.")),
    ("qwen3", None, " <think>\n\n</think>\n\nOk", ParsedAnswer("Ok")),
    ("qwen3", None, "Hm.\n</think>\n\nOk", ParsedAnswer("Hm.\n</think>\n\nOk")),
    ("qwen3", "…<think>\n", "Hm.\n</think>\n\nOk", ParsedAnswer("Ok", "Hm.")),
    ("qwen3", "…<think>\n\n</think>\n\n", "Ok", ParsedAnswer("Ok")),
    ("qwen3", None, " Ok <think>x</think>", ParsedAnswer(" Ok <think>x</think>")),
    ("qwen3", None, "<thi", ParsedAnswer("<thi")),
    ("qwen3", None, " ", ParsedAnswer(" ")),
    ("mistral", None, "[THINK]Hm.[/THINK]Ok", ParsedAnswer("Ok", "Hm.")),
    ("mistral", None, "[THINK]Hm [/THI", ParsedAnswer("", "Hm [/THI")),
    ("none", None, "<think>x</think>", ParsedAnswer("<think>x</think>")),
]


@pytest.mark.parametrize(("reasoning", "prompt", "text", "answer"), THOUGHT)
@pytest.mark.parametrize("tool", ["none", "hermes"])
def test_reasoning_comes_first(
    tool: str, reasoning: str, prompt: str | None, text: str, answer: ParsedAnswer
) -> None:
    assert read(tool, text, reasoning, prompt) == answer


def test_a_call_ends_reasoning_that_has_no_end() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for prompt in (None, "<think>\n"):
        begin = "" if prompt else "<think>"
        answer = read("hermes", f"{begin}I see.\n{call}", "qwen3", prompt)
        assert answer == ParsedAnswer("", "I see.", (ToolCall("f", "{}"),))
        answer = read("hermes", f"{begin}I see.\n{call}\n{call}\n", "qwen3", prompt)
        assert answer == ParsedAnswer("", "I see.", (ToolCall("f", "{}"),) * 2)
        answer = read("hermes", f"{begin}I use <tool_call> for calls.\n{call}", "qwen3", prompt)
        assert answer == ParsedAnswer("", "I use <tool_call> for calls.", (ToolCall("f", "{}"),))


def test_calls_in_reasoning_that_has_an_end_are_no_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = read("hermes", f"<think>{call}</think>{call}", "qwen3")
    assert answer == ParsedAnswer("", call, (ToolCall("f", "{}"),))
