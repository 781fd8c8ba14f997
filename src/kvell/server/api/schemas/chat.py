"""Bodies of ``/v1/chat/completions``: messages, tools, and what the answer may be."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.generation import Count, GenerationRequest
from kvell.server.api.schemas.other_fields import CHAT_OTHERS, Other
from kvell.server.api.schemas.request_body import RequestPart

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128


class TextPart(RequestPart):
    """A piece of a message that is text."""

    type: Literal["text", "input_text", "output_text"]
    """All three mean the same."""
    text: str
    """The text."""


class ImageUrl(RequestPart):
    """Where an image is: a data URL."""

    url: str
    """A ``data:`` URL; no other is fetched."""
    detail: str | None = None
    """Accepted and not used."""


class ImagePart(RequestPart):
    """A piece of a message that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """The image."""


class RefusalPart(RequestPart):
    """A piece of an earlier answer that refused."""

    type: Literal["refusal"]
    refusal: str
    """What it said instead of an answer."""


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS)]


class CalledFunction(RequestPart):
    """A function that an earlier answer called."""

    name: str = Field(max_length=256)
    """Name of the function."""
    arguments: object = ""
    """Its arguments, as JSON text.  Whatever the model wrote is passed on, half an object too."""


class ToolCallMessage(RequestPart):
    """A call in an earlier answer."""

    id: str = Field(default="", max_length=256)
    """Id of the call, which the function's result names."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """What was called."""


class ChatMessage(RequestPart):
    """One message of a conversation; fields of no meaning here are given to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Who speaks; ``function`` is an older name of ``tool``."""
    content: str | Parts | None = None
    """A text, or parts, which are joined if the model's chat template reads texts."""
    name: str | None = Field(default=None, max_length=256)
    """Name of the speaker, for chat templates that show it."""
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MAX_TOOLS)] | None = None
    """Calls that this answer made."""
    tool_call_id: str | None = Field(default=None, max_length=256)
    """With the role ``tool``: the call that this is the result of."""
    function_call: CalledFunction | None = None
    """The only call that this answer made; an older form of ``tool_calls``."""
    reasoning_content: str | None = None
    """Reasoning before this answer, for chat templates that show it; ``reasoning`` is the same."""
    audio: None = None
    """Only null: no sound is stored."""
    refusal: str | None = None
    """What this answer said instead of an answer."""

    def plain(self) -> dict[str, Any]:
        """The message with its content as text or parts, as it was sent.

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
            return content or self.refusal or ""
        return [_template_part(part) for part in content]


def _template_part(part: TextPart | ImagePart | RefusalPart) -> dict[str, str]:
    if isinstance(part, ImagePart):
        return {"type": "image"}
    return {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    others: ClassVar[Mapping[str, Other]] = CHAT_OTHERS

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far, oldest first."""
    max_completion_tokens: Count | None = None
    """Most output tokens; goes before ``max_tokens``; as many as fit if null."""
    logprobs: bool | None = None
    """Tell how likely each output token was."""
    top_logprobs: int | None = None
    """Tell this many likeliest tokens too, at most 20; means ``logprobs`` unless that is false."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that may be called: ``{"type": "function", "function": {"name": …}}``."""
    tool_choice: str | dict[str, Any] | None = None
    """``"none"``, ``"auto"``, ``"required"``, or one function: ``{"type": "function", …}``."""
    parallel_tool_calls: bool | None = None
    """Whether ``required`` may bring several calls; true if null."""
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """Given to the chat template under this name."""
    include_reasoning: bool = True
    """Whether the answer tells its reasoning."""
    thinking_token_budget: Count | None = None
    """Most tokens of reasoning; then the engine ends it, and the answer follows.

    -1 for no bound.  For models that mark their reasoning with tags.
    """
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Further variables of the chat template."""
    documents: Annotated[list[dict[str, object]], Field(max_length=MAX_PARTS)] | None = None
    """Given to the chat template under this name."""
    add_generation_prompt: bool | None = True
    """Whether the prompt ends with what opens the assistant's turn."""
    continue_final_message: bool | None = False
    """Whether the answer goes on with the last message; needs ``add_generation_prompt`` false."""
    add_special_tokens: bool | None = False
    """Whether the prompt gets special tokens beside those that the chat template puts in it."""
    modalities: list[Literal["text"]] | None = None
    """Only text is made."""

    def output_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def limit_field(self) -> str:
        """The name of the limit that goes before."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def output_logprobs(self) -> int | None:
        """``top_logprobs``, which means ``logprobs`` where that is left out.

        :raises ChangeSomething: if ``logprobs`` is false beside it.
        """
        if self.logprobs or (self.logprobs is None and self.top_logprobs):
            return self.top_logprobs or 0
        if self.top_logprobs:
            remedy = "set logprobs to true"
            raise ChangeSomething("top_logprobs", self.top_logprobs, "needs logprobs", remedy)
        return None

    def adds_special_tokens(self) -> bool:
        """``add_special_tokens``."""
        return bool(self.add_special_tokens)

    def continues_last(self) -> bool:
        """``continue_final_message``.

        :raises ChangeSomething: if the prompt is to open a new message too.
        """
        return checked_ending(self.add_generation_prompt, self.continue_final_message)

    def template_fields(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        fields = dict(self.chat_template_kwargs or {})
        for name in ("reasoning_effort", "documents"):
            value = getattr(self, name)
            if value is not None:
                fields.setdefault(name, value)
        return fields


def checked_ending(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether a prompt ends within its last message.

    :raises ChangeSomething: if it is to end with the beginning of a new one too.
    """
    if continue_final_message and add_generation_prompt is not False:
        problem, remedy = "opens a new message too", "set add_generation_prompt to false"
        raise ChangeSomething("continue_final_message", True, problem, remedy)
    return bool(continue_final_message)
