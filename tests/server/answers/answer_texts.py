"""Helpers and real answers for the tests of answer parsers."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from kvell.server.answers.deltas import AnswerDelta, AnswerParser, ParsedAnswer, merge, parse
from kvell.server.answers.named import parser_named

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
]  # fmt: skip

FRAGMENTS = (
    "<tool_call>", "</tool_call>", "\n", " ", '{"name": "f", "arguments": {"a": 1}}', "{", "}",
    '{"name": "f", "parameters": {', '"', "\\", "[", "]", ",", ";", "(", ")", "a=1", "f", "é😀",
    '{"name": "f"}', '{"arguments": {"a": "{"}, "name": "g"}', '{"a": 1}', "<|python_tag|>",
    "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "abc", "<function=f>", "</function>", "<parameter=days>",
    "<parameter=city>", "</parameter>", "f(a=1)", "'", "<|python_start|>", "<|python_end|>",
    "<|channel|>analysis", "<|channel|>final", " to=functions.f", "<|message|>", "<|end|>",
    "<|call|>", "<|start|>assistant", "<|channel|>commentary to=functions.g<|message|>", "<think>",
    "</think>", "[THINK]", "[/THINK]", "<", "<tool_", "[TOOL", "</", "null", "-",
)  # fmt: skip
"""What answers in all formats are made of, and pieces that break them."""


def texts() -> st.SearchStrategy[str]:
    """Answers that are made of markers, well-formed or not."""
    return st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def deltas_of(parser: AnswerParser, pieces: Sequence[str]) -> list[AnswerDelta]:
    """All of an answer's deltas, merged."""
    return merge([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])


def read(tool: str, text: str, reasoning: str = "none", prompt: str | None = None) -> ParsedAnswer:
    """A whole answer; that it is the same character by character is checked too."""
    named = parser_named(tool, reasoning)
    whole = deltas_of(named.parser(TOOLS, prompt=prompt), [text])
    assert deltas_of(named.parser(TOOLS, prompt=prompt), list(text)) == whole
    return parse(whole)


def calls(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    """Names and arguments, which must be JSON."""
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]
