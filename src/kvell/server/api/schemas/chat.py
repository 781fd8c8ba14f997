"""Bodies of ``/v1/chat/completions``: messages, tools, and what the answer may be."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.generation import Count, GenerationRequest

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128


class TextPart(BaseModel):
    """A piece of a message that is text."""

    type: Literal["text", "input_text", "output_text"]
    """All three mean the same."""
    text: str
    """The text."""


class ImageUrl(BaseModel):
    """Where an image is: a data URL."""

    model_config = ConfigDict(extra="forbid")
    url: str
    """A ``data:`` URL; no other is fetched."""
    detail: str | None = None
    """Accepted and not used."""


class ImagePart(BaseModel):
    """A piece of a message that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """The image."""


class RefusalPart(BaseModel):
    """A piece of an earlier answer that refused."""

    type: Literal["refusal"]
    refusal: str
    """What it said instead of an answer."""


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS)]


class CalledFunction(BaseModel):
    """A function that an earlier answer called."""

    name: str = Field(max_length=256)
    """Name of the function."""
    arguments: str
    """Its arguments, as JSON text."""


class ToolCallMessage(BaseModel):
    """A call in an earlier answer."""

    id: str = Field(max_length=256)
    """Id of the call, which the function's result names."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """What was called."""


class ChatMessage(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks."""
    content: str | Parts | None = None
    """A text, or parts that are joined."""
    name: str | None = Field(default=None, max_length=256)
    """Name of the speaker, for chat templates that show it."""
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MAX_TOOLS)] | None = None
    """Calls that this answer made."""
    tool_call_id: str | None = Field(default=None, max_length=256)
    """With the role ``tool``: the call that this is the result of."""
    reasoning_content: str | None = None
    """Reasoning before this answer, for chat templates that show it."""
    refusal: str | None = None
    """What this answer said instead of an answer."""

    def plain(self) -> dict[str, Any]:
        """The message with its content as text, or as parts where it has images.

        An image is ``{"type": "image"}``, as chat templates of such models know it.
        """
        return {**self.model_dump(exclude_none=True), "content": self._content()}

    def images(self) -> list[str]:
        """The URLs of its images, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def _content(self) -> str | list[dict[str, str]]:
        content = self.content
        if content is None or isinstance(content, str):
            return content or ""
        parts = [_template_part(part) for part in content]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)


def _template_part(part: TextPart | ImagePart | RefusalPart) -> dict[str, str]:
    if isinstance(part, ImagePart):
        return {"type": "image"}
    return {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far, oldest first."""
    max_completion_tokens: Count | None = None
    """Most output tokens; goes before ``max_tokens``; as many as fit if null."""
    logprobs: bool | None = None
    """Tell how likely each output token was."""
    top_logprobs: int | None = None
    """With ``logprobs``: tell this many likeliest tokens too, at most 20."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that may be called: ``{"type": "function", "function": {"name": …}}``."""
    tool_choice: str | dict[str, Any] | None = None
    """``"none"``, ``"auto"``, ``"required"``, or one function: ``{"type": "function", …}``."""
    parallel_tool_calls: bool | None = None
    """Whether ``required`` may bring several calls; true if null."""
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """Given to the chat template under this name."""
    thinking_token_budget: Count | None = None
    """Most tokens of reasoning; then the engine ends it, and the answer follows.

    -1 for no bound.  For models that mark their reasoning with tags.
    """
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = True
    """Whether the prompt ends with what opens the assistant's turn."""
    modalities: list[Literal["text"]] | None = None
    """Only text is made."""

    def output_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def output_logprobs(self) -> int | None:
        """``top_logprobs`` if ``logprobs`` is true.

        :raises ChangeSomething: if there is one without the other.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            remedy = "set logprobs to true"
            raise ChangeSomething("top_logprobs", self.top_logprobs, "needs logprobs", remedy)
        return None

    def template_fields(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        fields = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            fields.setdefault("reasoning_effort", self.reasoning_effort)
        return fields
