"""Turns of ``/v1/messages``, and the chat messages that they are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from kvell.errors import ChangeSomething
from kvell.server.answers.reading.json_text import write_json
from kvell.server.api.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    Part,
    TextPart,
    ToolCallMessage,
)
from kvell.server.api.schemas.messages.blocks import (
    Block,
    Blocks,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    said_part,
    said_parts,
)
from kvell.server.api.schemas.request_body import RequestPart

BILLING = "x-anthropic-billing-header:"
"""Begins a block by which Claude Code tells its version.

It differs from request to request, so behind it nothing would be found in a cache.
"""
BETWEEN_TURNS = "\n\n"
FAILED = "Error: "
_PLACE = re.compile(r"messages\[(\d+)\](\.content)?.*")

SystemBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageTurn(RequestPart):
    """One turn of a conversation; neighbours with one role are one turn."""

    role: Literal["user", "assistant", "system"]
    """Who speaks."""
    content: str | Blocks
    """A text, or blocks."""

    def blocks(self) -> Sequence[Block]:
        """Its blocks; a text is one."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


@dataclass
class TurnMessages:
    """The chat messages that a conversation is.

    :ivar origins: what in the request each message was made of.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def name_here(self, place: str) -> str | None:
        """What the request calls a place in the chat messages; None if it is no such place."""
        found = _PLACE.fullmatch(place)
        if found is None:
            return None
        origin = self.origins[int(found[1])]
        return origin if origin == "system" else origin + (found[2] or "")

    def going_on(self, origin: str, role: Literal["user", "assistant", "system"]) -> ChatMessage:
        """The message that a turn goes on with: the one before it if it has the same role."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == role:
            return last
        return self.add(origin, ChatMessage(role=role, content=[]))

    def add(self, origin: str, message: ChatMessage) -> ChatMessage:
        """One more message."""
        self.messages.append(message)
        self.origins.append(origin)
        return message


def conversation(
    system: str | list[TextBlock] | None, turns: Sequence[MessageTurn]
) -> TurnMessages:
    """The chat messages of a request.

    :raises ChangeSomething: if it ends with a call, or has too much of something.
    """
    found = TurnMessages()
    parts = [part for part in said_parts(system) if not _is_billing(part)]
    if parts:
        found.add("system", ChatMessage(role="system", content=parts))
    for number, turn in enumerate(turns):
        _add_turn(found, f"messages[{number}]", turn)
    _check(found, len(turns) - 1)
    return found


def _is_billing(part: Part) -> bool:
    return isinstance(part, TextPart) and part.text.startswith(BILLING)


def _add_turn(found: TurnMessages, origin: str, turn: MessageTurn) -> None:
    message: ChatMessage | None = None
    goes_on = False
    for number, block in enumerate(turn.blocks()):
        if isinstance(block, ToolResultBlock):
            _refuse_unless(turn.role == "user", f"{origin}.content[{number}]", block, "user")
            found.add(origin, _result(block))
            message = None
            continue
        if message is None:
            message = found.going_on(origin, turn.role)
            goes_on = bool(message.content)
        match block:
            case TextBlock() | ImageBlock():
                assert isinstance(message.content, list)
                if goes_on:
                    message.content.append(TextPart(type="text", text=BETWEEN_TURNS))
                message.content.append(said_part(block))
                goes_on = False
            case ToolUseBlock():
                place = f"{origin}.content[{number}]"
                _refuse_unless(turn.role == "assistant", place, block, "assistant")
                _add_call(place, message, block)
            case ThinkingBlock(thinking=thinking):
                message.reasoning_content = (message.reasoning_content or "") + thinking


def _result(block: ToolResultBlock) -> ChatMessage:
    parts = said_parts(block.content)
    if block.is_error:
        parts.insert(0, TextPart(type="text", text=FAILED))
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=parts)


def _add_call(place: str, message: ChatMessage, block: ToolUseBlock) -> None:
    try:
        arguments = write_json(block.input)
    except ValueError:
        problem, remedy = "has a number that JSON cannot say", "send a finite one"
        raise ChangeSomething(f"{place}.input", "{…}", problem, remedy) from None
    call = ToolCallMessage(
        id=block.id, function=CalledFunction(name=block.name, arguments=arguments)
    )
    if message.tool_calls is None:
        message.tool_calls = []
    message.tool_calls.append(call)


def _refuse_unless(fits: bool, place: str, block: Block, role: str) -> None:
    if not fits:
        remedy = f"send it in a message with the role {role}"
        raise ChangeSomething(f"{place}.type", block.type, "does not fit its role", remedy)


def _check(found: TurnMessages, last: int) -> None:
    if not found.messages:
        raise ChangeSomething("messages", "[]", "has no message", "send a message")
    if len(found.messages) > MAX_MESSAGES:
        value, remedy = (
            f"{len(found.messages)} messages and results",
            f"send at most {MAX_MESSAGES}",
        )
        raise ChangeSomething("messages", value, "are too many", remedy)
    for origin, message in zip(found.origins, found.messages, strict=True):
        for many, most in ((message.tool_calls, MAX_TOOLS), (message.content, MAX_PARTS)):
            if isinstance(many, list) and len(many) > most:
                remedy = f"send at most {most} in one turn"
                raise ChangeSomething(origin, f"{len(many)} blocks", "are too many", remedy)
    if found.is_begun and found.messages[-1].tool_calls:
        problem, remedy = "ends with a call, which nothing is written behind", "send its result"
        raise ChangeSomething(f"messages[{last}].content", "tool_use", problem, remedy)
