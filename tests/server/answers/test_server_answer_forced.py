"""``tool_choice``, the schemas that force calls, and how forced answers are read."""

import json
from typing import Any

import pytest

from kvell.engine.protocol.schemas.following import make_enforceable
from kvell.engine.protocol.schemas.strict import find_violation
from kvell.errors import ChangeSomething
from kvell.server.answers.deltas import Content, ParsedAnswer, ToolCall, ToolCallArguments, parse
from kvell.server.answers.forced import (
    AllowedFunctions,
    NamedFunction,
    ToolChoice,
    callable_tools,
    forced_schema,
    forced_tool_calls,
    strict_parts,
    tool_choice,
)
from kvell.server.answers.named import parser_named
from tests.engine.sampling.byte_grammars import schema_accepts
from tests.server.answers.answer_texts import deltas_of


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


F = tool("f", type="object", properties={"a": {"type": "integer"}})
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}


def allowed(mode: object, *tools: object) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_what_a_client_may_choose() -> None:
    assert tool_choice(None, []) == "none"
    assert tool_choice(None, [F]) == tool_choice("auto", [F]) == "auto"
    assert tool_choice("none", [F]) == "none"
    assert tool_choice("required", [F]) == "required"
    assert tool_choice(NAMED, [F]) == NamedFunction("f")
    assert tool_choice(allowed("auto", NAMED), [F, G]) == AllowedFunctions(frozenset("f"), False)
    assert tool_choice(allowed("required", NAMED), [F]) == AllowedFunctions(frozenset("f"), True)
    assert tool_choice(allowed("auto"), [F]) == AllowedFunctions(frozenset(), False)


@pytest.mark.parametrize(
    ("value", "tools", "message"),
    [
        ("required", [], "tool_choice=required: needs tools; send tools"),
        (NAMED, [G], "tool_choice.function.name=f: is not one of the tools; use one of g"),
        (NAMED, [], "tool_choice.function.name=f: is not one of the tools; send tools"),
        ("any", [F], "tool_choice=any: is not known; use"),
        ({"type": "function"}, [F], "is not known"),
        (7, [F], "is not known"),
        (allowed("none", NAMED), [F], 'allowed_tools.mode=none: is not known; use "auto"'),
        (allowed("required"), [F], "allowed_tools.tools=[]: has no function to call"),
        (allowed("auto", NAMED), [G], "allowed_tools.tools[0].function.name=f: is not one of"),
        (allowed("auto", NAMED, 7), [F], "allowed_tools.tools[1]=…: is not a function"),
        ({"type": "allowed_tools"}, [F], "is not known"),
    ],
)
def test_other_choices_are_refused(value: object, tools: list[Any], message: str) -> None:
    with pytest.raises(ChangeSomething) as refused:
        tool_choice(value, tools)
    assert message in str(refused.value)


def test_only_allowed_functions_are_seen_and_called() -> None:
    some, must = (AllowedFunctions(frozenset("g"), is_required) for is_required in (False, True))
    expected: list[tuple[ToolChoice, list[Any]]] = [(some, [G]), (must, [G])]
    for choice, tools in [*expected, ("auto", [F, G]), ("none", [])]:
        assert callable_tools(choice, [F, G]) == tools
    assert forced_schema(some, [F, G]) is None
    assert forced_tool_calls(some) is None
    assert forced_schema(must, [F, G]) == forced_schema("required", [G])
    assert forced_tool_calls(must) is not None


def test_a_free_answer_has_no_schema() -> None:
    for choice in ("none", "auto"):
        free: ToolChoice = "none" if choice == "none" else "auto"
        assert forced_schema(free, [F]) is None
        assert forced_tool_calls(free) is None


def test_a_named_function_forces_its_arguments() -> None:
    assert forced_schema(NamedFunction("f"), [G, F]) == F["function"]["parameters"]
    assert forced_schema(NamedFunction("g"), [G, F]) == {"type": "object", "properties": {}}


def test_required_forces_a_list_of_calls() -> None:
    schema = forced_schema("required", [F, G])
    assert schema == {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "f"},
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"type": "integer"}},
                        },
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "g"},
                        "parameters": {"type": "object", "properties": {}},
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                },
            ]
        },
    }
    single = forced_schema("required", [F], parallel=False)
    assert single is not None and single["maxItems"] == 1


def test_definitions_of_one_name_stay_apart_and_the_tools_as_they_are() -> None:
    def defined(**meaning: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/P"}},
            "$defs": {"P": meaning},
        }

    tools = [tool("f", **defined(type="null")), tool("g", **defined(type="boolean")), G]
    before = json.dumps(tools)
    schema = forced_schema("required", tools)
    assert json.dumps(tools) == before
    for name, value, other in (("f", None, True), ("g", True, None)):
        assert schema_accepts(schema, [{"name": name, "parameters": {"p": value}}])
        assert not schema_accepts(schema, [{"name": name, "parameters": {"p": other}}])


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "required": []}])
def test_a_function_without_parameters_gets_an_empty_object(parameters: dict[str, Any]) -> None:
    for schema, wrap in (
        (forced_schema(NamedFunction("h"), [tool("h", **parameters)]), lambda one: one),
        (
            forced_schema("required", [tool("h", **parameters)]),
            lambda one: [{"name": "h", "parameters": one}],
        ),
    ):
        assert schema_accepts(schema, wrap({}))
        assert not schema_accepts(schema, wrap({"a": 1}))
    free = tool("h", type="object", additionalProperties=True)
    assert schema_accepts(forced_schema(NamedFunction("h"), [free]), {"a": 1})


def test_only_a_strict_function_must_be_followed_whole() -> None:
    beyond = tool("h", type="object", properties={"a": {"type": "string", "format": "path"}})
    schema = forced_schema("required", [F, beyond])
    assert schema_accepts(schema, [{"name": "f", "parameters": {"a": 1}}])
    assert schema_accepts(schema, [{"name": "h", "parameters": {"a": "any"}}])
    assert refused_field("required", [F, beyond]) is None
    beyond["function"]["strict"] = True
    field = "tools[1].function.parameters"
    assert refused_field("required", [F, beyond]) == f"{field}.properties.a.format"
    assert refused_field(NamedFunction("h"), [F, beyond]) == f"{field}.properties.a.format"
    assert refused_field(NamedFunction("f"), [F, beyond]) is None
    assert refused_field(AllowedFunctions(frozenset("h"), True), [F, beyond]) == (
        f"{field}.properties.a.format"
    )
    assert refused_field(AllowedFunctions(frozenset("f"), True), [F, beyond]) is None
    odd = {"P": {"type": "string", "format": "path"}}
    beyond["function"]["parameters"] = {"items": {"$ref": "#/$defs/P"}, "$defs": odd}
    strict = F | {"function": F["function"] | {"strict": True, "name": "h.properties"}}
    assert (
        refused_field("required", [strict, G, beyond])
        == "tools[2].function.parameters.$defs.P.format"
    )
    beyond["function"]["strict"] = False
    assert refused_field("required", [strict, beyond]) is None


def refused_field(choice: ToolChoice, tools: list[Any]) -> str | None:
    unfollowed = make_enforceable(forced_schema(choice, tools)).unfollowed
    violation = find_violation(strict_parts(choice, tools), unfollowed)
    return None if violation is None else violation.field


def forced(choice: ToolChoice, text: str, reasoning: str = "none") -> ParsedAnswer:
    answers = []
    for pieces in ([text], list(text)):
        mode = forced_tool_calls(choice)
        parser = parser_named("hermes", reasoning).parser([F], forced=mode)
        answers.append(deltas_of(parser, pieces))
    assert answers[0] == answers[1]
    return parse(answers[0])


def test_required_answers_are_read() -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]\n'
    expected = (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
    assert forced("required", text) == ParsedAnswer(calls=expected)
    thought = forced("required", f"<think>Hm</think>\n{text}", "qwen3")
    assert thought == ParsedAnswer("", "Hm", expected)


def test_named_answers_are_read() -> None:
    answer = forced(NamedFunction("f"), ' {"a": "}"}\n')
    assert answer == ParsedAnswer(calls=(ToolCall("f", '{"a": "}"}'),))
    assert forced(NamedFunction("f"), '{"a": "') == ParsedAnswer(calls=(ToolCall("f", '{"a": "'),))
    assert forced(NamedFunction("f"), "{} x") == ParsedAnswer(" x", "", (ToolCall("f", "{}"),))


@pytest.mark.parametrize("text", ["", " ", "no", " [", "[1]", '[{"name": "f"}]', '[{"name"', '"'])
@pytest.mark.parametrize("choice", ["required", NamedFunction("f")])
def test_forced_answers_that_obey_nothing_are_content(choice: ToolChoice, text: str) -> None:
    assert forced(choice, text) == ParsedAnswer(text)


def test_a_forced_call_is_streamed() -> None:
    mode = forced_tool_calls("required")
    parser = parser_named("none", "none").parser(forced=mode)
    assert parser.push('[{"name": "f", "parameters": ') == []
    assert len(parser.push('{"a": ')) == 2
    assert len(parser.push("1")) == 1
    assert parser.push("}} oops") == [ToolCallArguments(0, "}"), Content(" oops")]


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
COMMENTARY = '<|channel|>commentary to=functions.f<|message|>{"a": 2}<|call|>'


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "arguments"),
    [
        (ANALYSIS + FINAL + '{"a": 1}', "", "Hm.", ['{"a": 1}']),
        (FINAL + '{"a": 1}', "", "", ['{"a": 1}']),
        (ANALYSIS + "<|channel|>final <|constrain|>json<|message|>{}", "", "Hm.", ["{}"]),
        (ANALYSIS + COMMENTARY, "", "Hm.", ['{"a": 2}']),
        (COMMENTARY + FINAL + '{"a": 1}', '{"a": 1}', "", ['{"a": 2}']),
        ("<|channel|>analysis<|message|>Hm.", "", "Hm.", []),
    ],
)
def test_gpt_oss_is_forced_behind_its_reasoning(
    text: str, content: str, reasoning: str, arguments: list[str]
) -> None:
    for pieces in ([text], list(text)):
        mode = forced_tool_calls(NamedFunction("f"))
        parser = parser_named("openai", "gpt_oss").parser([F], forced=mode)
        answer = parse(deltas_of(parser, pieces))
        calls = tuple(ToolCall("f", one) for one in arguments)
        assert answer == ParsedAnswer(content, reasoning, calls)


def test_without_reasoning_gpt_oss_is_forced_from_its_first_character() -> None:
    mode = forced_tool_calls(NamedFunction("f"))
    parser = parser_named("openai", "none").parser([F], forced=mode)
    assert parse(deltas_of(parser, ['{"a": 1}'])).calls == (ToolCall("f", '{"a": 1}'),)
