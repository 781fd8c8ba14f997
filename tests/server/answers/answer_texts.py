"""Helpers and real answers for the tests of answer parsers."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from kvell.server.answers.deltas import AnswerDelta, ParsedAnswer, merge, parse
from kvell.server.answers.named import parser_named
from kvell.server.answers.reading.modes import ModeParser

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "scale": {"type": ["number", "null"]},
                "metric": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "place": {"$ref": "#/$defs/Place"},
                "kind": {"enum": [1, 2]},
                "free": {},
            },
        },
    },
}
TOOLS = [WEATHER]

REAL = [
    ("hermes", "none", 'Hi.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
     '</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'),
    ("hermes", "qwen3", "<think>\nLet me see.\n</think>\n\nSure.\n<tool_call>\n"
     '{"arguments": {"a": [1, {"b": 2}]}, "name": "f"}\n</tool_call> done'),
    ("llama3_json", "none", '<|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}; '
     '{"type": "function", "name": "f", "parameters": {}}'),
    ("mistral", "mistral", '[THINK]hm 😀[/THINK]ok [TOOL_CALLS] [{"name": "f", "arguments": '
     '{"x": "\\"]"}}, {"name": "g", "arguments": {}, "id": "a1b2c3d4e"}]'),
    ("mistral", "none", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{}'),
    ("qwen3_coder", "deepseek_r1", "so\n</think>\n<tool_call>\n<function=weather>\n<parameter=city>"
     "\nBern\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"),
    ("pythonic", "none", "[weather(city=\"B'n)\", days=3), f(x={'a': [True, null]})]"),
    ("openai", "gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
     'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>'),
    ("none", "none", "Only text. <tool_call>\n"),
    ("deepseek_v3", "none", "Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
     'weather\n```json\n{"city": "Bern"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
     "<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("deepseek_v31", "deepseek_v3", "<think>so</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
     'weather<｜tool▁sep｜>{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("gemma4", "gemma4", "<|channel>thought\nhm<channel|>ok<|tool_call>call:weather"
     '{city:<|"|>B, a:n'
     '<|"|>,days:3,places:[<|"|>x<|"|>]}<tool_call|>'),
    ("glm45", "glm45", "<think>hm\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern"
     "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
    ("glm47", "none", "<tool_call>f</tool_call><tool_call>weather<arg_key>city</arg_key>"
     "<arg_value>B</arg_value></tool_call>"),
    ("granite", "none", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", '
     '"arguments": {}}]'),
    ("jamba", "none", 'Hi <tool_calls>[\n  {"name": "f", "arguments": {"a": 1}}\n]'
     "</tool_calls> ok"),
    ("kimi_k2", "kimi_k2", "<think>so</think>Hi<|tool_calls_section_begin|><|tool_call_begin|>"
     'functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>'
     "functions.g.h:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"),
    ("lfm2", "none", 'Hi <|tool_call_start|>[f(a=1), weather(city="B")]<|tool_call_end|> ok'),
    ("olmo3", "olmo3", '<think>so</think><function_calls>f(a=1)\nweather(city="B")'
     "</function_calls>"),
    ("phi4_mini_json", "none", '<|tool_call|>[{"type": "function", "function": {"name": "f", '
     '"arguments": {"a": 1}}}]<|/tool_call|>'),
    ("seed_oss", "seed_oss", "<seed:think>so</seed:think>Hi<seed:tool_call>\n<function=weather>\n"
     "<parameter=city>B</parameter>\n</function>\n</seed:tool_call>"),
    ("hermes", "qwen3", '<think>Now I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
     "</tool_call>"),
    ("hermes", "qwen3", "<think>I use <tool_call> and <tool_call>{ for calls.</think>Hi"),
]  # fmt: skip

FRAGMENTS = (
    "<tool_call>", "</tool_call>", "\n", " ", '{"name": "f", "arguments": {"a": 1}}', "{", "}",
    '{"name": "f", "parameters": {', '"', "\\", "[", "]", ",", ";", "(", ")", "a=1", "f", "é😀",
    '{"name": "f"}', '{"arguments": {"a": "{"}, "name": "g"}', '{"a": 1}', "<|python_tag|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</think>", "<tool_calls>", "```",
    "</tool_calls>", "<|tool_call|>", "<function_calls>", "</function_calls>", "<|tool_call>call:f",
    '<|"|>', "<tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<|tool_call_start|>", "<|tool_call_end|>", "<seed:tool_call>",
    "<|tool_call_begin|>", "functions.f:0<|tool_call_argument_begin|>", "functools",
    "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "abc", "<function=f>", "</function>", "<parameter=days>",
    "<parameter=city>", "</parameter>", "f(a=1)", "'", "<|python_start|>", "<|python_end|>",
    "<|channel|>analysis", "<|channel|>final", " to=functions.f", "<|message|>", "<|end|>",
    "<|call|>", "<|start|>assistant", "<|channel|>commentary to=functions.g<|message|>", "<think>",
    "</think>", "[THINK]", "[/THINK]", "<", "<tool_", "[TOOL", "</", "null", "-",
)  # fmt: skip
"""What answers in all formats are made of, and pieces that break them."""


def texts() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def deltas_of(parser: ModeParser, pieces: Sequence[str]) -> list[AnswerDelta]:
    return merge([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])


def read(tool: str, text: str, reasoning: str = "none", prompt: str | None = None) -> ParsedAnswer:
    """A whole answer; that it is the same character by character is checked too."""
    named = parser_named(tool, reasoning)
    whole = deltas_of(named.parser(TOOLS, prompt=prompt), [text])
    assert deltas_of(named.parser(TOOLS, prompt=prompt), list(text)) == whole
    return parse(whole)


def calls(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]
