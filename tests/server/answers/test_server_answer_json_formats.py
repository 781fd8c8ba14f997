"""Calls in JSON (Hermes's, Llama's and Mistral's), and in formats that name them."""

from typing import Any

import pytest

from kvell.engine.protocol.structured_outputs import Reasoning as StructuredReasoning
from kvell.errors import ChangeSomething
from kvell.server.answers.deltas import (
    Content,
    ParsedAnswer,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    merge,
    parse,
)
from kvell.server.answers.named import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    default_parsers,
    parser_named,
)
from kvell.server.answers.reading.modes import ModeParser
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


HERMES = '{%- if tools %}<tools>…</tools><tool_call>\n{"name": …}</tool_call>{% endif %}'
QWEN3 = HERMES + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
DEFAULTS = [
    ("qwen2", HERMES, ("hermes", "none")),
    ("qwen3", QWEN3, ("hermes", "qwen3")),
    ("qwen3_next", "{{ tools }}<tool_call>\n<function=x></think>", ("qwen3_coder", "qwen3")),
    (
        "qwen2",
        "{{ content.split('</think>')[-1] }}<｜Assistant｜><think>\n",
        ("none", "deepseek_r1"),
    ),
    ("deepseek_v3", "{{ content.split('</think>')[-1] }}", ("none", "deepseek_r1")),
    ("smollm3", QWEN3, ("hermes", "qwen3")),
    ("glm4_moe", "{{ tools }}<tool_call>{name}<arg_key></think>", ("glm45", "qwen3")),
    ("deepseek_v3", "{{ tools }}<｜tool▁calls▁begin｜>", ("deepseek_v3", "none")),
    ("seed_oss", "{{ tools }}<seed:tool_call><seed:think>", ("seed_oss", "seed_oss")),
    ("gemma4_text", "{{ tools }}<|tool_call>call:<|channel>thought", ("gemma4", "gemma4")),
    ("granitemoehybrid", "{{ tools }}<tool_call>", ("hermes", "none")),
    ("granite", "{{ tools }}<|tool_call|>", ("granite", "none")),
    ("granite", "{{ tools }}", ("granite", "none")),
    ("jamba", "{{ tools }}<tool_calls>", ("jamba", "none")),
    ("kimi_linear", "{{ tools }}<|tool_calls_section_begin|>", ("kimi_k2", "none")),
    ("olmo3", "{{ tools }}<function_calls>", ("olmo3", "none")),
    ("phi3", "{{ tools }}<|tool|><|/tool|>", ("phi4_mini_json", "none")),
    ("llama", 'tools {"name": n, "parameters": d} <|python_tag|>', ("llama3_json", "none")),
    ("llama", 'tools {"name": n, "parameters": d}', ("llama3_json", "none")),
    ("llama", "{{ tools }}", ("none", "none")),
    ("llama4_text", "{{ tools }}", ("pythonic", "none")),
    ("lfm2", "{{ tools }}<|tool_call_start|>", ("lfm2", "none")),
    ("mistral", "{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", ("mistral", "none")),
    ("mistral", "{{ tools }}[TOOL_CALLS][THINK]", ("mistral", "mistral")),
    ("gpt_oss", "", ("openai", "gpt_oss")),
    ("any", "<|channel|>analysis", ("openai", "gpt_oss")),
    ("gemma3_text", "{{ messages }}", ("none", "none")),
    ("mamba", "", ("none", "none")),
]


@pytest.mark.parametrize(("model_type", "template", "expected"), DEFAULTS)
def test_the_template_tells_the_parsers(
    model_type: str, template: str, expected: tuple[str, str]
) -> None:
    assert default_parsers(model_type, template) == expected
    parser_named(*expected)


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
def test_parsers_go_together_unless_only_one_is_gpt_oss(tool: str, reasoning: str) -> None:
    channels = (tool == "openai", reasoning == "gpt_oss")
    if channels[0] == channels[1] or "none" in (tool, reasoning):
        parser = parser_named(tool, reasoning).parser()
        assert merge([*parser.push("x"), *parser.finish()])
    else:
        with pytest.raises(ChangeSomething, match="cannot be combined with"):
            parser_named(tool, reasoning)


def parsed_text(parser: ModeParser, text: str) -> ParsedAnswer:
    return parse([*parser.push(text), *parser.finish()])


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ChangeSomething) as refused:
        parser_named("hermess", "none")
    assert str(refused.value) == (
        f"--tool-call-parser=hermess: is not known; use one of {', '.join(TOOL_PARSERS)}"
    )
    with pytest.raises(ChangeSomething) as refused:
        parser_named("none", "minimax")
    assert str(refused.value) == (
        f"--reasoning-parser=minimax: is not known; use one of {', '.join(REASONING_PARSERS)}"
    )


OPEN, CLOSED, NEITHER = "…<think>\n", "…<think>\n\n</think>\n\n", "…assistant\n"
HARMONY = StructuredReasoning(("<|channel|>final", "<|message|>"))


@pytest.mark.parametrize(
    ("reasoning", "prompt", "expected"),
    [
        ("none", OPEN, None),
        ("qwen3", OPEN, StructuredReasoning(("</think>",))),
        ("qwen3", NEITHER, StructuredReasoning(("</think>",), "<think>")),
        ("qwen3", CLOSED, None),
        ("deepseek_r1", OPEN, StructuredReasoning(("</think>",))),
        ("deepseek_r1", NEITHER, StructuredReasoning(("</think>",))),
        ("deepseek_r1", CLOSED, None),
        ("mistral", NEITHER, StructuredReasoning(("[/THINK]",), "[THINK]")),
        ("mistral", "…[THINK]", StructuredReasoning(("[/THINK]",))),
        ("mistral", "…[THINK][/THINK]", None),
        ("gpt_oss", "…<|start|>assistant", HARMONY),
    ],
)
def test_the_prompt_tells_what_an_answer_may_say_before_its_grammar(
    reasoning: str, prompt: str, expected: StructuredReasoning | None
) -> None:
    assert parser_named("none", reasoning).reasoning_behind(prompt) == expected


THOUGHTS = {"deepseek_r1": "Hm. {", "qwen3": "<think>\nHm. {", "mistral": "[THINK]Hm. {"}
GPT_OSS = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant<|channel|>final"


@pytest.mark.parametrize(
    ("reasoning", "thought"),
    [
        *THOUGHTS.items(),
        ("gpt_oss", GPT_OSS),
        ("gpt_oss", GPT_OSS + " <|constrain|>json"),
    ],
)
def test_a_parser_reads_content_from_where_a_grammar_begins(reasoning: str, thought: str) -> None:
    """What is looked for in the bytes of an output is what the parser finds in its text."""
    answers = parser_named("none", reasoning)
    told = answers.reasoning_behind("…")
    assert told is not None and thought.lstrip().startswith(told.start)
    text, begin = thought + told.ends[-1] + '{"a": 1}', 0
    for end in told.ends:
        begin = text.index(end, begin) + len(end)
    answer = parsed_text(answers.parser(prompt="…"), text)
    assert (answer.reasoning, answer.content) == ("Hm. {", text[begin:])


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed_text(parser_named("hermes", "none").parser(), text) == ParsedAnswer(text)


def test_some_formats_need_special_tokens() -> None:
    pairs = [("openai", "gpt_oss"), ("mistral", "none"), ("none", "mistral"), ("hermes", "qwen3")]
    shown = [parser_named(*pair).shows_special_tokens for pair in pairs]
    assert shown == [True, True, True, False]


def test_merging_joins_neighbours_of_one_kind() -> None:
    deltas = merge(
        [
            Content("a"),
            Content("b"),
            Reasoning("c"),
            Content("d"),
            ToolCallBegin(0, "f"),
            ToolCallArguments(0, "{"),
            ToolCallArguments(0, "}"),
            ToolCallBegin(1, "f"),
            ToolCallBegin(2, "f"),
            ToolCallArguments(2, "{}"),
        ]
    )
    assert deltas == [
        Content("ab"),
        Reasoning("c"),
        Content("d"),
        ToolCallBegin(0, "f"),
        ToolCallArguments(0, "{}"),
        ToolCallBegin(1, "f"),
        ToolCallBegin(2, "f"),
        ToolCallArguments(2, "{}"),
    ]
