"""Content blocks of ``/v1/messages``: the parts of a message in Anthropic's API."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from kvell.engine.protocol.schemas.references import Schema
from kvell.server.api.schemas.chat import MAX_PARTS, ImagePart, ImageUrl, Part, TextPart
from kvell.server.api.schemas.request_body import RequestPart


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
