"""Turns of Anthropic's API become chat messages, and hints of caching Kvell's own."""

from typing import Any

import pytest

from kvell.server.api.schemas.chat import ChatMessage
from kvell.server.api.schemas.messages.requests import CountTokensRequest, MessagesRequest

MARK = {"type": "ephemeral"}


def chat_of(turns: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    asked = CountTokensRequest.model_validate({"model": "m", "messages": turns, **more})
    return [joined(one.plain()) for one in asked.chat().messages]


def joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    is_text = isinstance(content, str) or any(part["type"] == "image" for part in content)
    return message if is_text else message | {"content": "\n".join(one["text"] for one in content)}


def returns_of(**fields: Any) -> bool | None:
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    chat = MessagesRequest.model_validate(asked | fields).chat()
    return chat.will_return


def test_thousands_of_thoughts_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned: list[str] = []

    def note(message: ChatMessage, name: str, value: object) -> None:
        assigned.append(name)
        object.__setattr__(message, name, value)

    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turns: list[dict[str, Any]] = [{"role": "assistant", "content": [thought] * 900}] * 3
    asked = CountTokensRequest.model_validate({"model": "m", "messages": turns})
    monkeypatch.setattr(ChatMessage, "__setattr__", note)
    [message] = asked.chat().messages
    assert message.reasoning_content == "hm" * 2700
    assert assigned == ["reasoning_content"]


def test_neighbours_with_one_role_are_one_turn() -> None:
    """Chat templates that want roles to alternate get them so."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"k": [1, "é"]}}]},
        {"role": "user", "content": [
            {"type": "text", "text": "before"}, {"type": "tool_result", "tool_use_id": "t"},
            {"type": "text", "text": "behind"}]},
        {"role": "user", "content": "e"},
    ]  # fmt: skip
    calls = [
        {
            "id": "t",
            "type": "function",
            "function": {"name": "f", "arguments": '{"k": [1, "é"]}'},
        }
    ]
    assert chat_of(turns) == [
        {"role": "user", "content": "a\n\nb\nc"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "t", "content": ""},
        {"role": "user", "content": "behind\n\ne"},
    ]


def test_system_messages_stay_where_they_are() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    told = chat_of(turns, system="s")
    assert [(one["role"], one["content"]) for one in told] == [
        *(("system", "s"), ("user", "a"), ("system", "b"), ("user", "c")),
    ]
    assert chat_of(turns[1:], system="s")[0]["content"] == "s\n\nb"


@pytest.mark.parametrize(
    ("source", "url"),
    [
        (
            {"type": "base64", "media_type": "image/webp", "data": "AAAA"},
            "data:image/webp;base64,AAAA",
        ),
        ({"type": "url", "url": "data:image/png;base64,BBBB"}, "data:image/png;base64,BBBB"),
    ],
)
def test_images_become_urls(source: dict[str, Any], url: str) -> None:
    image = {"type": "image", "source": source}
    turn = {"role": "user", "content": [image, {"type": "text", "text": "what is it"}]}
    asked = CountTokensRequest.model_validate({"model": "m", "messages": [turn]})
    [message] = asked.chat().messages
    assert message.images() == [url]


def turn_with(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [block]}]


@pytest.mark.parametrize(
    ("fields", "returns"),
    [
        ({}, None),
        ({"will_return": True}, True),
        ({"cache_control": MARK}, True),
        ({"cache_control": MARK | {"ttl": "1h"}}, True),
        ({"cache_control": MARK, "will_return": False}, False),
        ({"system": [{"type": "text", "text": "s", "cache_control": MARK}]}, True),
        ({"tools": [{"name": "f", "cache_control": MARK | {"ttl": "1h"}}]}, True),
        ({"messages": turn_with({"type": "text", "text": "a", "cache_control": MARK})},
         True),
        ({"messages": turn_with({"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "text", "text": "a", "cache_control": MARK | {"ttl": "1h"}}]})},
         True),
    ],
)  # fmt: skip
def test_a_cache_control_says_that_the_prompt_returns(
    fields: dict[str, Any], returns: bool | None
) -> None:
    assert returns_of(**fields) == returns
