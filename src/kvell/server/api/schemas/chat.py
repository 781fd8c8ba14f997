"""The body of ``/v1/chat/completions``: messages, tools, and options of the answer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.generation import GenerationRequest
from kvell.server.api.schemas.other_fields import others_of
from kvell.server.api.schemas.request_body import RequestBody, RequestPart
from kvell.server.api.schemas.sampling_fields import Count, TokenIds

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128


class TextPart(RequestPart):
    """A text part of a message."""

    type: Literal["text", "input_text", "output_text"]
    """All three mean the same."""
    text: str
    """The text."""


class ImageUrl(RequestPart):
    """The data URL of an image."""

    url: str
    """A ``data:`` URL; no other is fetched."""
    detail: str | None = None
    """Accepted and not used."""


class ImagePart(RequestPart):
    """An image part of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """The image."""


class RefusalPart(RequestPart):
    """A part of an earlier answer that is a refusal."""

    type: Literal["refusal"]
    refusal: str
    """Text of the refusal."""


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(RequestPart):
    """A function that an earlier answer called."""

    name: str = Field(max_length=256)
    """Name of the function."""
    arguments: object = ""
    """Its arguments, as JSON text; passed on as the model wrote them, even if incomplete."""


class ToolCallMessage(RequestPart):
    """A call in an earlier answer."""

    id: str = Field(default="", max_length=256)
    """Id of the call; the function's result refers to it."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """The called function."""


class ChatMessage(RequestPart):
    """One message of a conversation; unknown fields are passed to the chat template."""

    others = others_of("chat_message")
    place = "messages[]."

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Author of the message; ``function`` is an older name of ``tool``."""
    content: str | Parts | None = None
    """A text, or parts, which are joined if the model's chat template reads texts."""
    name: str | None = Field(default=None, max_length=256)
    """Name of the author, for chat templates that show it."""
    tool_calls: (
        Annotated[list[ToolCallMessage], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    """Calls in this answer."""
    tool_call_id: str | None = Field(default=None, max_length=256)
    """With the role ``tool``: id of the call whose result this is."""
    function_call: CalledFunction | None = None
    """The only call in this answer; an older form of ``tool_calls``."""
    reasoning_content: str | None = None
    """Reasoning before this answer, for chat templates that show it; ``reasoning`` is the same."""
    refusal: str | None = None
    """Refusal instead of an answer."""

    def plain(self) -> dict[str, Any]:
        """Return the message with its content as text or parts, as it was sent.

        An image is ``{"type": "image"}``, as chat templates expect it.
        """
        content = self.content if isinstance(self.content, str) else ""
        return {**self.model_dump(exclude_none=True), "content": content or self._content()}

    def texts(self) -> tuple[str, str]:
        content = self._content()
        if not isinstance(content, str):
            content = "\n".join(part.get("text", "") for part in content)
        return content, self.reasoning_content or ""

    def images(self) -> list[str]:
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


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    others = others_of("everywhere", "generation", "chat")

    messages: Messages
    """The conversation so far, oldest first."""
    max_completion_tokens: Count | None = None
    """Maximum output tokens; overrides ``max_tokens``; as many as fit if null."""
    logprobs: bool | None = None
    """Return the log probability of each output token."""
    top_logprobs: int | None = None
    """Return this many likeliest tokens too, at most 20; implies ``logprobs`` if that is null."""
    tools: Tools | None = None
    """Functions that may be called: ``{"type": "function", "function": {"name": …}}``."""
    tool_choice: str | dict[str, Any] | None = None
    """``"none"``, ``"auto"``, ``"required"``, one function: ``{"type": "function", …}``, or some:
    ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}``."""
    parallel_tool_calls: bool | None = None
    """Whether ``required`` allows several calls; true if null."""
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """Passed to the chat template under this name."""
    include_reasoning: bool = True
    """Whether the answer contains its reasoning."""
    thinking_token_budget: Count | None = None
    """Maximum reasoning tokens; then the engine ends the reasoning, and the answer follows.

    -1 means no limit.  For models that mark their reasoning with tags.
    """
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Further variables of the chat template."""
    documents: (
        Annotated[list[dict[str, object]], Field(max_length=MAX_PARTS, fail_fast=True)] | None
    ) = None
    """Passed to the chat template under this name."""
    add_generation_prompt: bool | None = True
    """Whether the prompt ends with the opening of the assistant's turn."""
    continue_final_message: bool | None = False
    """Whether the answer continues the last message; needs ``add_generation_prompt`` false."""
    add_special_tokens: bool | None = False
    """Whether the prompt gets special tokens in addition to those of the chat template."""

    def output_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def output_logprobs(self) -> int | None:
        """Return ``top_logprobs``, which implies ``logprobs`` if that is null.

        :raises ChangeSomething: if ``top_logprobs`` is set and ``logprobs`` is false.
        """
        if self.logprobs or (self.logprobs is None and self.top_logprobs):
            return self.top_logprobs or 0
        if self.top_logprobs:
            remedy = "set logprobs to true"
            raise ChangeSomething("top_logprobs", self.top_logprobs, "needs logprobs", remedy)
        return None

    def adds_special_tokens(self) -> bool:
        return bool(self.add_special_tokens)

    def continues_last(self) -> bool:
        """Return ``continue_final_message``.

        :raises ChangeSomething: if the prompt also opens a new message.
        """
        return checked_ending(self.add_generation_prompt, self.continue_final_message)

    def template_fields(self) -> dict[str, Any]:
        """Return the variables of the chat template besides messages and tools."""
        fields = dict(self.chat_template_kwargs or {})
        for name in ("reasoning_effort", "documents"):
            value = getattr(self, name)
            if value is not None:
                fields.setdefault(name, value)
        return fields


def checked_ending(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether a prompt ends within its last message.

    :raises ChangeSomething: if the prompt also opens a new message.
    """
    if continue_final_message and add_generation_prompt is not False:
        problem, remedy = (
            "conflicts with add_generation_prompt",
            "set add_generation_prompt to false",
        )
        raise ChangeSomething("continue_final_message", True, problem, remedy)
    return bool(continue_final_message)


class TokenizeRequest(RequestBody):
    """The body of ``/tokenize``: a text or a conversation."""

    prompt: str | None = None
    """A text; null if ``messages`` are given."""
    messages: Messages | None = None
    """A conversation; null if ``prompt`` is given."""
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    """Whether a text gets the special tokens of a prompt."""
    return_token_strs: bool | None = False
    """Return the text of each token too."""


class DetokenizeRequest(RequestBody):
    """The body of ``/detokenize``."""

    tokens: TokenIds
    """Token ids, each below the size of the vocabulary."""
