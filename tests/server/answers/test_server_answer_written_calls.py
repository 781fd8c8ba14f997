"""Calls as grammars know them: what a format's own parser reads as calls may be an answer."""

from typing import Any

import pytest

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.server.answers.deltas import ToolCall, parse
from kvell.server.answers.named import TOOL_PARSERS, parser_named
from tests.engine.sampling.byte_grammars import accepts
from tests.server.answers.answer_texts import deltas_of

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
    for text, calls in WRITTEN[name]:
        assert parse(deltas_of(answers.parser(TOOLS), [text])).calls == calls
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
