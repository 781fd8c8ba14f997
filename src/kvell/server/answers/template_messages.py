"""Messages of a request as Hugging Face's chat templates expect them.

Arguments of calls become objects, since templates write them with ``tojson``; vLLM
does the same.  A tool's message gets the name of the function that its id belongs to.
Arguments that are not an object are kept as they are: an answer that was truncated in the middle
of a call stays a part of its conversation.  So are arguments beyond ``MOST_ARGUMENT_PARTS``.  The
functions belong in a thread of texts, not on an event loop.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvell.errors import ChangeSomething
from kvell.server.answers.reading.json_text import read_json

MOST_CALLS = 128
MOST_ARGUMENT_PARTS = 1 << 19
"""The most brackets, commas and colons in the texts of a conversation's arguments that are read.

Those in strings count too; arguments that fit a context of a million tokens have fewer.
"""
_READ = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
    | {"reasoning_content", "reasoning"}
)
"""Fields that this module reads; other fields are passed to the template unchanged."""
_ROLES = {"developer": "system", "function": "tool"}
Message = Mapping[str, Any]


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for ``apply_chat_template``.

    :param messages: OpenAI's messages, with content that is text, a list of parts or None.
    :raises ChangeSomething: with the wrong field, such as
        ``messages[2].tool_calls[0].function.name``.
    """
    names: dict[str, str] = {}
    rendered = []
    reader = _ArgumentReader()
    for i, message in enumerate(messages):
        shown = _rendered(f"messages[{i}]", message, reader)
        for call in shown.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if shown["role"] == "tool" and "name" not in shown and shown["tool_call_id"] in names:
            shown["name"] = names[shown["tool_call_id"]]
        rendered.append(shown)
    return rendered


def with_objects(messages: Sequence[Message]) -> Sequence[Message] | None:
    """Return the messages for templates that iterate over arguments, which must be objects.

    :param messages: messages of :func:`template_messages`.
    :return: messages with ``{"arguments": …}`` around other arguments; None if all are objects.
    """
    changed = [
        message
        | {
            "tool_calls": [
                {**call, "function": call["function"] | {"arguments": {"arguments": arguments}}}
                if not isinstance(arguments := call["function"]["arguments"], dict)
                else call
                for call in message["tool_calls"]
            ]
        }
        if "tool_calls" in message
        else message
        for message in map(dict, messages)
    ]
    return changed if changed != list(messages) else None


class _ArgumentReader:
    """The reader of a conversation's arguments."""

    def __init__(self) -> None:
        self._left = MOST_ARGUMENT_PARTS

    def read(self, arguments: object) -> object:
        """Return the object of a call's arguments; what is not JSON or too large stays a text."""
        if arguments is None or arguments == "":
            return {}
        if not isinstance(arguments, str):
            return arguments
        parts = sum(map(arguments.count, "[{,:"))
        if parts > self._left:
            return arguments
        self._left -= parts
        try:
            value = read_json(arguments)
            if "\\u" in arguments:  # it may be half a character, which cannot be encoded
                json.dumps(value, ensure_ascii=False).encode()
        except ValueError:
            return arguments
        return {} if value is None else value


def _rendered(field: str, message: Message, reader: _ArgumentReader) -> dict[str, Any]:
    role = _ROLES.get(message["role"], message["role"])
    shown: dict[str, Any] = {key: value for key, value in message.items() if key not in _READ}
    shown |= {"role": role, "content": _content(message.get("content"))}
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        shown |= {"reasoning_content": reasoning} if isinstance(reasoning, str) else {}
        calls = message.get("tool_calls")
        only = message.get("function_call")
        if only is not None and not calls:
            calls = [{"function": only}]
        shown |= {"tool_calls": _calls(f"{field}.tool_calls", calls, reader)} if calls else {}
    if role == "tool":
        shown["tool_call_id"] = str(message.get("tool_call_id") or "")
    return shown


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return list(content) if content else ""


def _calls(field: str, calls: object, reader: _ArgumentReader) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ChangeSomething(field, type(calls).__name__, "is not a list", "send a list of calls")
    if len(calls) > MOST_CALLS:
        remedy = f"send at most {MOST_CALLS}"
        raise ChangeSomething(field, f"{len(calls)} calls", "is out of range", remedy)
    return [_call(f"{field}[{i}]", call, reader) for i, call in enumerate(calls)]


def _call(field: str, call: object, reader: _ArgumentReader) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        remedy = 'send {"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise ChangeSomething(field, type(call).__name__, "is not a call", remedy)
    if call.get("type", "function") != "function":
        raise ChangeSomething(f"{field}.type", "…", "is not served", 'use "function"')
    name = _string(f"{field}.function.name", function.get("name"))
    arguments = reader.read(function.get("arguments"))
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _string(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ChangeSomething(field, type(value).__name__, "is not text", "send a string")
    return value
