"""Parsers by name, and which of them fit a model."""

import pytest

from kvell.engine.protocol.structured_outputs import Reasoning as StructuredReasoning
from kvell.errors import ChangeSomething
from kvell.server.answers.deltas import (
    Content,
    ParsedAnswer,
    Reasoning,
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
