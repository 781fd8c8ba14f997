"""Arguments of function calls in the form that a chat template takes.

Most templates write arguments with ``tojson``, or iterate over them: these take objects, as in
vLLM.  Some (DeepSeek V3's) join them to other text: these take the text that clients send.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from kvell.errors import ChangeSomething
from kvell.models.text.content_format import Message, Render, with_content
from kvell.wire.json_text import read_json, write_json

MOST_ARGUMENT_PARTS = 1 << 19
"""The most brackets, commas and colons in the texts of a conversation's arguments that are read.

Those in strings count too; arguments that fit a context of a million tokens have fewer.
"""
NAME = "kvellprobe3c9d"
_ARGUMENTS = {NAME: "x"}


def with_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    """Return the messages with each call's arguments in the template's form.

    Text that is not JSON stays text: an answer that was truncated in the middle of a call stays a
    part of its conversation.  So does text beyond ``MOST_ARGUMENT_PARTS``.
    """
    return changed_arguments(messages, _text if as_text else ArgumentReader().read)


def takes_argument_text(render: Render, parts_for: frozenset[str]) -> bool:
    """Return whether a template shows arguments right only if they are text.

    :param render: the template; it may raise anything.
    :param parts_for: roles whose content it reads as a list of parts.
    :raises ChangeSomething: if the template works without end.
    """
    as_objects = _shown(render, parts_for, _ARGUMENTS)
    if NAME in as_objects and f"'{NAME}'" not in as_objects:  # not as Python writes a dict
        return False
    return f'"{NAME}"' in _shown(render, parts_for, write_json(_ARGUMENTS))


def _shown(render: Render, parts_for: frozenset[str], arguments: object) -> str:
    call = {"name": "probe", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": call}]
    conversation: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    try:
        return render(with_content(conversation, parts_for))
    except ChangeSomething:
        raise
    except Exception:  # a template may do anything but show the arguments
        return ""


class ArgumentReader:
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


def _text(arguments: object) -> object:
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else write_json(arguments)


def changed_arguments(
    messages: Sequence[Message], change: Callable[[object], object]
) -> list[Message]:
    """Return the messages with each call's arguments changed."""
    return [
        {**message, "tool_calls": [_call(call, change) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _call(call: object, change: Callable[[object], object]) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}
