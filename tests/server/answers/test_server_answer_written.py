"""Answers written as each family writes them come out as what was meant."""

import json
import keyword
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.server.answers.deltas import ParsedAnswer, ToolCall, parse
from kvell.server.answers.named import TOOL_PARSERS, parser_named
from tests.engine.sampling.byte_grammars import accepts
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


DEFINED = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": DEFINED}},
    {"type": "function", "function": {"name": "weathers"}},
]
FORM = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
TAGS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>'),
    *("<|tool_call>", "<tool_call|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<function_calls>", "</function_calls>"),
)
WEATHER, NOTHING = ToolCall("weather", '{"city": "Bern"}'), ToolCall("weathers", "{}")
ARGUMENTS = '{"city": "Bern"}'
HERMES = [f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>']
LLAMA = [f'{{"name": "weather", "parameters": {ARGUMENTS}}}']
DEEPSEEK = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜>"
)
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
LISTED = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
)
SEED = "<seed:tool_call>\n<function=weather>\n<parameter=city>Bern</parameter>\n</function>\n"
BEGUN = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "gemma4": '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>',
    "glm45": GLM,
    "glm47": GLM,
    "granite": f"<|tool_call|>{LISTED}",
    "jamba": f"<tool_calls>{LISTED}</tool_calls>",
    "kimi_k2": KIMI,
    "lfm2": '<|tool_call_start|>[weather(city="Bern")]<|tool_call_end|>',
    "olmo3": '<function_calls>weather(city="Bern")</function_calls>',
    "phi4_mini_json": f"<|tool_call|>{LISTED}<|/tool_call|>",
    "seed_oss": SEED,
}
"""Formats of which a grammar knows only how a call begins."""
WRITTEN: dict[str, list[tuple[str, tuple[ToolCall, ...]]]] = {
    "hermes": [
        (HERMES[0], (WEATHER,)),
        (f"{HERMES[0]}\n{HERMES[0]}", (WEATHER, WEATHER)),
    ],
    "llama3_json": [
        (LLAMA[0], (WEATHER,)),
        (f'{LLAMA[0]}; {{"name": "weathers", "parameters": {{}}}}', (WEATHER, NOTHING)),
        (f"<|python_tag|>{LLAMA[0]}", (WEATHER,)),
    ],
    "mistral": [
        (f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]weathers{{}}", (WEATHER, NOTHING)),
        (f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", (WEATHER,)),
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]', (WEATHER,)),
    ],
    "pythonic": [('[weather(city="Bern"), weathers()]', (WEATHER, NOTHING))],
    **{name: [(text, (WEATHER,))] for name, text in BEGUN.items()},
    "qwen3_coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n",
            (WEATHER,),
        )
    ],
}


@pytest.mark.parametrize("tags", [(), TAGS])
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_a_parser_reads_as_calls_may_stand_for_the_format(
    name: str, tags: tuple[str, ...]
) -> None:
    answers = parser_named(name, "none")
    asked = StructuredOutputs(json=FORM, calls=answers.calls_instead(TOOLS))
    for text, written in WRITTEN[name]:
        assert parse(deltas_of(answers.parser(TOOLS), [text])).calls == written
        assert accepts(asked, text, tags), text
    assert accepts(asked, '{"name": "weather"}', tags)
    assert not accepts(asked, "It rains.", tags)
    assert not accepts(asked, '{"name": "weather", "age": 1}', tags)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES[0].replace("weather", "storms")),
        ("hermes", HERMES[0].replace("city", "town")),
        ("llama3_json", LLAMA[0].replace('"Bern"', "7")),
        ("mistral", "[TOOL_CALLS]weather{}"),
        ("pythonic", "[storms()]"),
    ],
)
def test_other_calls_may_not(name: str, text: str) -> None:
    asked = StructuredOutputs(json=FORM, calls=parser_named(name, "none").calls_instead(TOOLS))
    assert not accepts(asked, text, TAGS)


def test_several_calls_need_leave() -> None:
    calls = parser_named("hermes", "none").calls_instead(TOOLS, parallel=False)
    asked = StructuredOutputs(json=FORM, calls=calls)
    assert accepts(asked, HERMES[0], TAGS)
    assert not accepts(asked, f"{HERMES[0]}\n{HERMES[0]}", TAGS)


def test_each_parser_writes_calls_or_needs_no_leave() -> None:
    bare = {"none", "openai"}
    for name in TOOL_PARSERS:
        answers = parser_named(name, "gpt_oss" if name == "openai" else "none")
        assert answers.calls_instead([]) is None
        assert (answers.calls_instead(TOOLS) is None) == (name in bare)
