"""Answers written as each family writes them come out as what was meant."""

import json
import keyword
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.server.answers.deltas import ParsedAnswer, parse
from kvell.server.answers.named import parser_named
from tests.server.answers.answer_texts import calls, cut, deltas_of

Call: TypeAlias = tuple[str, dict[str, Any]]
Writer: TypeAlias = Callable[[str, Sequence[Call]], str]

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
WORDS = st.text("abc é😀{}\"'\\,:.", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=4)
CUTS = st.lists(st.integers(0, 2000), max_size=8)


def as_object(call: Call, key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def hermes(text: str, made: Sequence[Call]) -> str:
    written = (f"<tool_call>\n{as_object(call, 'arguments')}\n</tool_call>" for call in made)
    return "\n".join([text, *written])


def llama(_: str, made: Sequence[Call]) -> str:
    return "; ".join(as_object(call, "parameters") for call in made)


def mistral_list(text: str, made: Sequence[Call]) -> str:
    written = ", ".join(as_object(call, "arguments") for call in made)
    return f"{text}[TOOL_CALLS] [{written}]" if made else text


def mistral_names(text: str, made: Sequence[Call]) -> str:
    return text + "".join(f"[TOOL_CALLS]{name}{json.dumps(values)}" for name, values in made)


def python(_: str, made: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        for name, values in made
    )
    return f"[{', '.join(written)}]" if made else ""


def channels(text: str, made: Sequence[Call]) -> str:
    messages = [f"<|channel|>commentary<|message|>{text}<|end|>"]
    for name, values in made:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        messages.append(f"{header}{json.dumps(values)}<|call|>")
    return "<|start|>assistant".join(messages)


def tags(text: str, made: Sequence[Call]) -> str:
    written = []
    for name, values in made:
        inner = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in values.items()
        )
        written.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join([text, *written])


def tools_for(made: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"properties": {key: schema(value) for key, value in values.items()}},
            },
        }
        for name, values in made
    ] or [{"type": "function", "function": {"name": "unused"}}]


def schema(value: object) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}


WRITERS: list[tuple[str, Writer, bool]] = [
    ("hermes", hermes, True),
    ("llama3_json", llama, False),
    ("mistral", mistral_list, True),
    ("mistral", mistral_names, True),
    ("openai", channels, True),
    ("pythonic", python, False),
    ("qwen3_coder", tags, True),
]


@pytest.mark.parametrize(("tool", "writer", "has_text"), WRITERS)
@given(st.data(), CALLS, CUTS)
def test_what_was_written_is_read(
    tool: str, writer: Writer, has_text: bool, data: Any, made: list[Call], cuts: list[int]
) -> None:
    made = list({name: (name, values) for name, values in made}.values())
    text = data.draw(st.text("abc é.\n", max_size=10)).strip() if has_text else ""
    written = writer(text, made)
    parser = parser_named(tool, "none").parser(tools_for(made))
    answer = parse(deltas_of(parser, cut(written, cuts)))
    assert calls(answer) == made
    assert answer.content.strip() == text


@pytest.mark.parametrize(
    ("reasoning", "lead", "form"),
    [
        ("qwen3", "", "<think>\n{}\n</think>\n\n"),
        ("deepseek_r1", "", "<think>\n{}\n</think>\n\n"),
        ("deepseek_r1", "", "{}</think>"),
        ("qwen3", "…<think>\n", "{}\n</think>\n\n"),
    ],
)
@given(st.text("abc <>/think\n", max_size=20), CALLS, CUTS)
def test_reasoning_before_calls_is_read(
    reasoning: str, lead: str, form: str, thought: str, made: list[Call], cuts: list[int]
) -> None:
    thought = thought.strip()
    if "think>" in thought:
        return
    written = form.format(thought) + hermes("Ok", made)
    parser = parser_named("hermes", reasoning).parser(tools_for(made), prompt=lead or None)
    answer = parse(deltas_of(parser, cut(written, cuts)))
    assert (answer.reasoning, answer.content.strip(), calls(answer)) == (thought, "Ok", made)


@given(CALLS, CUTS, st.integers(0, 2000))
def test_an_answer_that_is_cut_off_keeps_whole_calls(
    made: list[Call], cuts: list[int], length: int
) -> None:
    written = hermes("Ok", made)
    written = written[: length % (len(written) + 1)]
    parser = parser_named("hermes", "none").parser(tools_for(made))
    answer = parse(deltas_of(parser, cut(written, cuts)))
    whole = written.count("\n</tool_call>")
    assert calls(ParsedAnswer(calls=answer.calls[:whole])) == made[:whole]
    assert len(answer.calls) <= whole + 1
    for call, (name, values) in zip(answer.calls, made, strict=False):
        assert call.name == name
        assert json.dumps(values, ensure_ascii=False).startswith(call.arguments)
