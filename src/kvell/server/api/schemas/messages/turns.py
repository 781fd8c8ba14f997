"""Turns of ``/v1/messages``, and their translation to chat messages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from kvell.engine.protocol.schemas.references import Schema
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ImagePart,
    ImageUrl,
    Part,
    TextPart,
    ToolCallMessage,
)
from kvell.server.api.schemas.request_body import RequestPart
from kvell.wire.json_text import write_json


class CacheControl(RequestPart):
    """A mark that a later request will begin with the prompt up to here.

    Every prompt is cached, with or without a mark.  A mark anywhere sets ``will_return``.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    """Accepted and not used."""


class _Block(RequestPart):
    cache_control: CacheControl | None = None
    """A mark that a later request will begin with the prompt up to here."""


class TextBlock(_Block):
    """A text block."""

    type: Literal["text"]
    text: str
    """The text."""


class Base64Source(RequestPart):
    """An image in the request itself."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    """Kind of the image."""
    data: str
    """The encoded file in base64."""


class UrlSource(RequestPart):
    """An image by its URL."""

    type: Literal["url"]
    url: str
    """A ``data:`` URL; no other is fetched."""


class ImageBlock(_Block):
    """An image block."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    """The image, in the request or as a URL."""

    def url(self) -> str:
        source = self.source
        if isinstance(source, UrlSource):
            return source.url
        return f"data:{source.media_type};base64,{source.data}"


SaidBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]
SaidBlocks = Annotated[list[SaidBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolUseBlock(_Block):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    """Id of the call; its result refers to it."""
    name: str = Field(max_length=256)
    """Name of the tool."""
    input: Schema
    """Its arguments."""


class ToolResultBlock(_Block):
    """The result of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    """Id of the call whose result this is."""
    content: str | SaidBlocks | None = None
    """A text, or blocks that are joined."""
    is_error: bool | None = None
    """Whether the call failed; the model reads ``Error:`` before the content."""


class ThinkingBlock(_Block):
    """The thinking of an earlier answer, for chat templates that show it."""

    type: Literal["thinking"]
    thinking: str
    """The text."""
    signature: str | None = None
    """Accepted and not used: thinking is not checked for changes."""


class RedactedThinkingBlock(_Block):
    """Thinking that only the server that wrote it can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str
    """Accepted and not used."""


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


def said_parts(content: str | Sequence[TextBlock | ImageBlock] | None) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [said_part(block) for block in content]


def said_part(block: TextBlock | ImageBlock) -> Part:
    if isinstance(block, ImageBlock):
        return ImagePart(type="image_url", image_url=ImageUrl(url=block.url()))
    return TextPart(type="text", text=block.text)


def cache_controls(blocks: str | Sequence[Block] | None) -> list[CacheControl]:
    """Return all cache controls of blocks and of the blocks inside them."""
    controls: list[CacheControl] = []
    for block in () if blocks is None or isinstance(blocks, str) else blocks:
        controls += [block.cache_control] if block.cache_control else []
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            controls += [inner.cache_control for inner in block.content if inner.cache_control]
    return controls


BILLING = "x-anthropic-billing-header:"
"""Prefix of a block in which Claude Code sends its version.

The block is dropped: it differs in each request, so prompts with it would miss the cache.
"""
BETWEEN_TURNS = "\n"
"""The beginning of a turn that continues a message; its template adds a line break (or none)."""
FAILED = "Error: "
PLACE = re.compile(r"messages\[(\d+)\](\.content)?.*")

SystemBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageTurn(RequestPart):
    """One turn of a conversation; consecutive turns with one role are merged."""

    role: Literal["user", "assistant", "system"]
    """Author of the turn."""
    content: str | Blocks
    """A text, or blocks."""

    def blocks(self) -> Sequence[Block]:
        """Return the turn's blocks; a text is one block."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


@dataclass
class TurnMessages:
    """The chat messages of a conversation.

    :ivar origins: field of the request that each message was made of.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    _thoughts: dict[int, list[str]] = field(default_factory=dict)

    @property
    def is_begun(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def name_here(self, number: int, content: str) -> str:
        """Return the request's name of a place in the chat messages.

        :param content: ``.content`` for a place inside the content, or "".
        """
        origin = self.origins[number]
        return origin if origin == "system" else origin + content

    def going_on(self, origin: str, role: Literal["user", "assistant", "system"]) -> ChatMessage:
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == role:
            return last
        return self.add(origin, ChatMessage(role=role, content=[]))

    def add_thinking(self, text: str) -> None:
        """Add thinking to the last message; :meth:`join_thinking` joins it."""
        self._thoughts.setdefault(len(self.messages) - 1, []).append(text)

    def join_thinking(self) -> None:
        for number, texts in self._thoughts.items():
            self.messages[number].reasoning_content = "".join(texts)

    def add(self, origin: str, message: ChatMessage) -> ChatMessage:
        self.messages.append(message)
        self.origins.append(origin)
        return message


def conversation(
    system: str | list[TextBlock] | None, turns: Sequence[MessageTurn]
) -> TurnMessages:
    """Return the chat messages of a request.

    :raises ChangeSomething: if the request ends with a call, or has too many messages or blocks.
    """
    chat = TurnMessages()
    parts = [part for part in said_parts(system) if not _is_billing(part)]
    if parts:
        chat.add("system", ChatMessage(role="system", content=parts))
    for number, turn in enumerate(turns):
        _add_turn(chat, f"messages[{number}]", turn)
    _check(chat, len(turns) - 1)
    chat.join_thinking()
    return chat


def _is_billing(part: Part) -> bool:
    return isinstance(part, TextPart) and part.text.startswith(BILLING)


def _add_turn(chat: TurnMessages, origin: str, turn: MessageTurn) -> None:
    message: ChatMessage | None = None
    goes_on = False
    for number, block in enumerate(turn.blocks()):
        if isinstance(block, ToolResultBlock):
            _refuse_unless(turn.role == "user", f"{origin}.content[{number}]", block, "user")
            chat.add(origin, _result(block))
            message = None
            continue
        if message is None:
            message = chat.going_on(origin, turn.role)
            goes_on = bool(message.content)
        match block:
            case TextBlock() | ImageBlock():
                assert isinstance(message.content, list)
                part = said_part(block)
                message.content += _introduced(BETWEEN_TURNS, [part]) if goes_on else [part]
                goes_on = False
            case ToolUseBlock():
                place = f"{origin}.content[{number}]"
                _refuse_unless(turn.role == "assistant", place, block, "assistant")
                _add_call(place, message, block)
            case ThinkingBlock(thinking=thinking):
                chat.add_thinking(thinking)


def _result(block: ToolResultBlock) -> ChatMessage:
    parts = said_parts(block.content)
    if block.is_error:
        parts = _introduced(FAILED, parts)
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=parts)


def _introduced(text: str, parts: list[Part]) -> list[Part]:
    if parts and isinstance(first := parts[0], TextPart):
        return [TextPart(type="text", text=text + first.text), *parts[1:]]
    return [TextPart(type="text", text=text), *parts]


def _add_call(place: str, message: ChatMessage, block: ToolUseBlock) -> None:
    try:
        arguments = write_json(block.input)
    except ValueError:
        problem, remedy = "has a number that JSON cannot represent", "send a finite one"
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


def _check(chat: TurnMessages, last: int) -> None:
    if not chat.messages:
        raise ChangeSomething("messages", "[]", "has no message", "send a message")
    if len(chat.messages) > MAX_MESSAGES:
        value, remedy = (
            f"{len(chat.messages)} messages and results",
            f"send at most {MAX_MESSAGES}",
        )
        raise ChangeSomething("messages", value, "are too many", remedy)
    for origin, message in zip(chat.origins, chat.messages, strict=True):
        for items, limit in ((message.tool_calls, MAX_TOOLS), (message.content, MAX_PARTS)):
            if isinstance(items, list) and len(items) > limit:
                remedy = f"send at most {limit} in one turn"
                raise ChangeSomething(origin, f"{len(items)} blocks", "are too many", remedy)
    if chat.is_begun and chat.messages[-1].tool_calls:
        problem, remedy = "ends with a tool call without its result", "send its result"
        raise ChangeSomething(f"messages[{last}].content", "tool_use", problem, remedy)
