"""The ``tools`` of a request, and messages as templates expect them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvell.errors import ChangeSomething
from kvell.models.text.chat_template import MOST_ARGUMENT_PARTS, with_arguments
from kvell.server.answers.forced import chat_tools
from kvell.server.api.prompts import template_messages, with_objects
from kvell.server.api.schemas.chat import ChatMessage
from tests.server.answers.answer_texts import WEATHER


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_tools_that_are_right_stay_as_they_are() -> None:
    assert chat_tools(None) == chat_tools([]) == []
    assert chat_tools([WEATHER]) == [WEATHER]
    whole = tool(description="does f", strict=True, parameters={"type": "object"})
    assert chat_tools([whole]) == [whole]


def test_unknown_and_empty_fields_do_not_reach_the_template() -> None:
    given_tool = tool(description=None, parameters=None, strict=None, colour="red") | {"x": 1}
    assert chat_tools([given_tool]) == [tool()]


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([tool(name=f"f{i}") for i in range(129)], "tools"),
        ([WEATHER, 7], "tools[1]"),
        ([WEATHER, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([WEATHER, WEATHER, tool(name="")], "tools[2].function.name"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name="f\n")], "tools[0].function.name"),
        ([tool(name="é")], "tools[0].function.name"),
        ([tool(name="f" * 65)], "tools[0].function.name"),
        ([tool(name=7)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=7)], "tools[0].function.description"),
        ([tool(description="x" * 70_000)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters="{}")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"$defs": []})], "tools[0].function.parameters.$defs"),
        ([tool(parameters=nested(100_000))], "tools[0].function.parameters"),
        ([tool(parameters={"enum": [0] * 20_000})], "tools[0].function.parameters"),
        ([tool(parameters={"description": "x" * 300_000})], "tools[0].function.parameters"),
    ],
)
def test_tools_that_are_wrong_are_refused_by_field(tools: object, field: str) -> None:
    with pytest.raises(ChangeSomething) as refused:
        chat_tools(tools)
    assert refused.value.field == field
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "function"}])
def test_a_tool_need_not_say_that_it_is_a_function_and_may_have_a_dot(kind: dict[str, Any]) -> None:
    [checked] = chat_tools([{**kind, "function": {"name": "files.read-all_2"}}])
    assert checked == {"type": "function", "function": {"name": "files.read-all_2"}}


def test_bounds_are_reached_before_they_are_passed() -> None:
    assert len(chat_tools([tool(name=f"f{i}") for i in range(128)])) == 128
    assert len(chat_tools([tool(name="f" * 64, parameters=nested(28))])) == 1


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["type", "function", "name", "parameters"]),
                                      inner)))  # fmt: skip
def test_whatever_is_sent_is_checked_or_refused(sent: Any) -> None:
    for tools in (sent, [sent], [{"type": "function", "function": sent}], [tool(parameters=sent)]):
        try:
            chat_tools(tools)
        except ChangeSomething as refused:
            assert refused.field.startswith("tools")


def call(**function: Any) -> dict[str, Any]:
    inner = {"name": "weather", "arguments": '{"city": "Bern"}', **function}
    return {"id": "call_1", "type": "function", "function": inner}


def shown_arguments(messages: list[dict[str, Any]], *, as_text: bool) -> list[Any]:
    """Arguments of the first call of each message, as a template gets them."""
    shown: Any = with_arguments(template_messages(messages), as_text=as_text)
    return [message["tool_calls"][0]["function"]["arguments"] for message in shown]


def test_a_conversation_with_calls_is_rendered() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Rain?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call()], "reasoning": "Hm."},
        {"role": "tool", "content": "yes", "tool_call_id": "call_1"},
        {"role": "tool", "content": "?", "tool_call_id": "call_2", "name": "other"},
        {"role": "assistant", "content": "It rains.", "tool_calls": []},
    ]
    before = json.dumps(messages)
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert template_messages(messages) == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Rain?", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "yes", "tool_call_id": "call_1", "name": "weather"},
        {"role": "tool", "content": "?", "tool_call_id": "call_2", "name": "other"},
        {"role": "assistant", "content": "It rains."},
    ]
    assert json.dumps(messages) == before


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_without_arguments_gets_an_empty_object(arguments: object) -> None:
    messages = [{"role": "assistant", "tool_calls": [call(arguments=arguments)]}]
    assert shown_arguments(messages, as_text=False) == [{}]
    assert shown_arguments(messages, as_text=True) == ["{}"]


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def test_arguments_are_read_up_to_a_number_of_parts_in_a_conversation() -> None:
    most = f"[{'[],' * (MOST_ARGUMENT_PARTS // 4 - 1)}1]"
    messages = [{"role": "assistant", "tool_calls": [call(arguments=most)]}] * 3
    arguments = shown_arguments(messages, as_text=False)
    assert [isinstance(value, list) for value in arguments] == [True, True, False]
    assert arguments[2] == most


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": ', '{"a": '),
        ("null", {}),
        ("Bern, please", "Bern, please"),
        ("[1]", [1]),
        ([1], [1]),
        ({"city": "Bern"}, {"city": "Bern"}),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        (DEEP, DEEP),
        ("[" * 500_000, "[" * 500_000),
        ('{"a": ' * 5000, '{"a": ' * 5000),
    ],
)
def test_what_a_model_wrote_is_passed_on_as_it_is(arguments: object, shown: object) -> None:
    messages = [{"role": "assistant", "tool_calls": [call(arguments=arguments)]}]
    assert shown_arguments(messages, as_text=False) == [shown]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert shown_arguments(messages, as_text=True) == [text]
    objects: Any = with_objects(template_messages(messages))
    if isinstance(shown, dict):
        assert objects is None
    else:
        assert objects is not None
        [call_shown] = objects[0]["tool_calls"]
        assert call_shown["function"] == {"name": "weather", "arguments": {"arguments": shown}}
        assert call_shown["id"] == "call_1"


def test_an_older_call_and_its_result_are_rendered_as_todays() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "sunny"},
    ]
    first, second = template_messages(messages)
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert second == {"role": "tool", "name": "f", "content": "sunny", "tool_call_id": ""}


def test_fields_of_a_message_that_only_a_template_knows_reach_it() -> None:
    [message] = template_messages([{"role": "assistant", "content": "x", "thinking": "Hm."}])
    assert message == {"role": "assistant", "content": "x", "thinking": "Hm."}


WRONG: list[dict[str, Any]] = [
    {"tool_calls": {"id": 1}},
    {"tool_calls": [call()] * 129},
    {"tool_calls": [7]},
    {"tool_calls": [call(), {"id": "x"}]},
    {"tool_calls": [call() | {"type": "custom"}]},
]


@pytest.mark.parametrize("message", WRONG)
def test_calls_that_are_wrong_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="tool_calls"):
        ChatMessage.model_validate({"role": "assistant"} | message)


def test_a_call_without_a_name_is_refused_by_field() -> None:
    wrong = {"role": "assistant", "tool_calls": [call(name="")]}
    with pytest.raises(ChangeSomething) as refused:
        template_messages([{"role": "user", "content": "x"}, wrong])
    assert refused.value.field == "messages[1].tool_calls[0].function.name"
