"""Messages of a request as Hugging Face's chat templates expect them.

Arguments of calls stay as they were sent; :mod:`kvell.models.text.call_arguments` reads them.  A
tool's message gets the name of the function that its id belongs to.  The functions belong in a
thread of texts, not on an event loop.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.text.call_arguments import ArgumentReader, changed_arguments

MOST_CALLS = 128
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
    for i, message in enumerate(messages):
        shown = _rendered(f"messages[{i}]", message)
        for call in shown.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if shown["role"] == "tool" and "name" not in shown and shown["tool_call_id"] in names:
            shown["name"] = names[shown["tool_call_id"]]
        rendered.append(shown)
    return rendered


def with_objects(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages for templates that iterate over arguments, which must be objects.

    :return: messages with ``{"arguments": …}`` around other arguments; None if all are objects.
    """
    reader = ArgumentReader()
    others = list[object]()

    def read(sent: object) -> object:
        arguments = reader.read(sent)
        if isinstance(arguments, dict):
            return arguments
        others.append(arguments)
        return {"arguments": arguments}

    changed = changed_arguments(messages, read)
    return changed if others else None


def _rendered(field: str, message: Message) -> dict[str, Any]:
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
        shown |= {"tool_calls": _calls(f"{field}.tool_calls", calls)} if calls else {}
    if role == "tool":
        shown["tool_call_id"] = str(message.get("tool_call_id") or "")
    return shown


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return list(content) if content else ""


def _calls(field: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ChangeSomething(field, type(calls).__name__, "is not a list", "send a list of calls")
    if len(calls) > MOST_CALLS:
        remedy = f"send at most {MOST_CALLS}"
        raise ChangeSomething(field, f"{len(calls)} calls", "is out of range", remedy)
    return [_call(f"{field}[{i}]", call) for i, call in enumerate(calls)]


def _call(field: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        remedy = 'send {"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise ChangeSomething(field, type(call).__name__, "is not a call", remedy)
    if call.get("type", "function") != "function":
        raise ChangeSomething(f"{field}.type", "…", "is not served", 'use "function"')
    name = _string(f"{field}.function.name", function.get("name"))
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": function.get("arguments")},
    }


def _string(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ChangeSomething(field, type(value).__name__, "is not text", "send a string")
    return value
