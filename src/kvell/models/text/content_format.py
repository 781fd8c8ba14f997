"""Detection of a chat template's content format: a text or a list of parts.

A template that reads parts shows nothing of a text, and raises no error. So it is probed with both,
for each role; one that shows neither reads parts if it has a loop over them, as in vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from kvell.errors import ChangeSomething

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
"""No further variables of a chat template."""
ContentFormat = Literal["auto", "string", "openai"]
"""The input of a template: a text, parts as in OpenAI's API, or the format that it reads."""
Message = Mapping[str, object]
Render = Callable[[Sequence[Message]], str]


ROLES = frozenset({"system", "user", "assistant", "tool"})
USER = "user"
BETWEEN_PARTS = "\n"
"""The text between the text parts of a message for a template that reads texts, as in vLLM."""
PROBE = "kvellprobe7f3a"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": {}}}


def with_content(messages: Sequence[Message], parts_for: frozenset[str]) -> list[Message]:
    """Return the messages with each text in the template's format.

    Content with images stays a list of parts: a template of such a model defines their places.

    :param parts_for: roles whose content is a list of parts; other roles than :data:`ROLES` are as
        the user.
    :raises KeyError: if a part of type ``text`` has no ``text``.
    """
    return [_with_content(message, parts_for) for message in messages]


def roles_with_parts(render: Render, *, iterates: bool) -> frozenset[str]:
    """Return the roles whose content a template reads as a list of parts.

    :param render: the template; it may raise anything.
    :param iterates: whether it has a loop over the content of a message.
    :raises ChangeSomething: if the template works without end.
    """
    by_user = _reads_parts(render, lambda content: [_said(USER, content)])
    if by_user is None:
        by_user = iterates
    question = _said(USER, _content("hello", is_parts=by_user))
    called = {**_said("assistant", _content("", is_parts=by_user)), "tool_calls": [_CALL]}
    answered = {"name": "probe", "tool_call_id": _CALL["id"]}
    reads = {
        USER: by_user,
        "system": _reads_parts(render, lambda content: [_said("system", content), question]),
        "assistant": _reads_parts(
            render, lambda content: [question, _said("assistant", content), question]
        ),
        "tool": _reads_parts(
            render, lambda content: [question, called, {**_said("tool", content), **answered}]
        ),
    }
    return frozenset(role for role, parts in reads.items() if (by_user if parts is None else parts))


def _with_content(message: Message, parts_for: frozenset[str]) -> Message:
    content, role = message.get("content"), message.get("role")
    is_parts = (role if role in ROLES else USER) in parts_for
    if isinstance(content, str) and is_parts:
        return {**message, "content": _content(content, is_parts=True)}
    if isinstance(content, list) and not is_parts and _is_text(content):
        return {**message, "content": BETWEEN_PARTS.join(str(part["text"]) for part in content)}
    return message


def _is_text(parts: Sequence[object]) -> bool:
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)


def _content(text: str, *, is_parts: bool) -> str | list[dict[str, str]]:
    return [{"type": "text", "text": text}] if is_parts else text


def _said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _reads_parts(render: Render, conversation: Callable[[object], list[Message]]) -> bool | None:
    """Return whether a text is shown only if it is a part; None if it is not shown either way."""
    for is_parts in (False, True):
        try:
            text = render(conversation(_content(PROBE, is_parts=is_parts)))
        except ChangeSomething:
            raise
        except Exception:  # a template may do anything but show the text
            continue
        if PROBE in text.lower():
            return is_parts
    return None
