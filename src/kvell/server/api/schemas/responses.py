"""The body of ``/v1/responses``, and its translation to a chat request."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.schemas.references import Schema
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from kvell.server.api.schemas.formats import (
    JsonSchemaFormat,
    ResponseFormat,
)
from kvell.server.api.schemas.other_fields import RESPONSES_OTHERS
from kvell.server.api.schemas.request_body import RequestPart, rename
from kvell.server.api.schemas.response_items import (
    InputItem,
    chat_messages,
    left_out_items,
)
from kvell.server.api.schemas.response_tools import (
    chat_choice,
    chat_functions,
    left_out_tools,
    named_as_sent_tool,
)
from kvell.server.api.schemas.sampling_fields import Count, SamplingFields

LOGPROBS = "message.output_text.logprobs"
_SAME = (
    *SamplingFields.model_fields,
    *("parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget"),
)
"""Fields that chat has under the same name."""
_NAMES_HERE = (
    (re.compile(r"messages\b.*"), "input"),
    (re.compile(r"tool_choice\.allowed_tools(\.tools\[\d+\])\.function"), r"tool_choice\1"),
    (re.compile(r"tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"max_(completion_)?tokens"), "max_output_tokens"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"logprobs"), "top_logprobs"),
    (re.compile(r"chat_template_kwargs\.reasoning_effort|reasoning_effort"), "reasoning.effort"),
)


class TextFormat(RequestPart):
    """The constraint of the text."""

    type: Literal["text", "json_object", "json_schema"]
    """``text`` for any text, ``json_object`` for any JSON object, or a schema."""
    name: str = Field(default="answer", max_length=64)
    """Accepted and not used, but repeated in the answer."""
    description: str | None = Field(default=None, max_length=4096)
    """Accepted and not used, but repeated in the answer."""
    # Not "schema": pydantic's models have a method of that name.
    json_schema: Schema | None = Field(default=None, alias="schema")
    """With the type ``json_schema``: the schema."""
    strict: bool | None = None
    """True refuses a schema with keywords that the text cannot follow."""

    def chat(self) -> ResponseFormat:
        schema = JsonSchemaFormat(name=self.name, schema=self.json_schema, strict=self.strict)
        is_schema = self.type == "json_schema"
        return ResponseFormat(type=self.type, json_schema=schema if is_schema else None)


class TextField(RequestPart):
    """``text``; the verbosity of an answer is up to the model."""

    format: TextFormat | None = None
    """Constraint of the answer's text."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted and not used, but repeated in the answer."""


class ReasoningField(RequestPart):
    """``reasoning``; answers contain the whole reasoning, and no summary."""

    effort: str | None = Field(default=None, max_length=32)
    """Passed to the chat template as ``reasoning_effort``."""
    summary: str | None = Field(default=None, max_length=32)
    """Accepted and not used."""
    generate_summary: str | None = Field(default=None, max_length=32)
    """Accepted and not used."""


class ResponsesRequest(SamplingFields):
    """Body of ``/v1/responses``, with vLLM's extensions."""

    others = RESPONSES_OTHERS

    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES - 1, fail_fast=True)]
    """A text, or the items of a conversation, oldest first.

    Calls of tools that are not functions, and their outputs, are left out.
    """
    instructions: str | None = None
    """A system message before the conversation."""
    max_output_tokens: Count | None = None
    """Maximum output tokens, including reasoning; as many as fit if null."""
    top_logprobs: int | None = None
    """Return this many likeliest tokens at each position, at most 20; ``include``, if given, must
    ask for log probabilities too."""
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    """``message.output_text.logprobs`` returns log probabilities; other values add nothing."""
    text: TextField | None = None
    """Constraint of the text."""
    reasoning: ReasoningField | None = None
    """Amount of reasoning."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    """Functions that may be called: ``{"type": "function", "name": …}``.

    Tools of other types are left out, and so are functions inside a ``namespace``.
    """
    tool_choice: str | dict[str, Any] | None = None
    """``"none"``, ``"auto"``, ``"required"``, ``{"type": "function", "name": …}``, or
    ``{"type": "allowed_tools", "mode": "auto", "tools": […]}``."""
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Accepted and not used, but repeated in the answer."""
    truncation: Literal["auto", "disabled"] | None = None
    """A conversation that is too long is refused with either value."""

    metadata: Annotated[dict[str, object], Field(max_length=64)] | None = None
    """Accepted and not used, but repeated in the answer."""
    user: object = None
    """Accepted and not used, but repeated in the answer."""
    safety_identifier: object = None
    """Accepted and not used, but repeated in the answer."""
    thinking_token_budget: Count | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None

    def chat(self) -> ChatRequest:
        """Return the equivalent request to chat completions.

        :raises ChangeSomething: if the request needs something that is not supported.
        """
        if self.top_logprobs and not self.tells_logprobs():
            problem = "needs the probabilities"
            remedy = f'add "{LOGPROBS}" to include'
            raise ChangeSomething("top_logprobs", self.top_logprobs, problem, remedy)
        chosen = self.text.format if self.text else None
        return ChatRequest(
            **{name: getattr(self, name) for name in _SAME},
            messages=chat_messages(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.tells_logprobs(),
            top_logprobs=self.top_logprobs,
            tools=self.tools and chat_functions(self.tools),
            tool_choice=chat_choice(self.tool_choice, self.tools or ()),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=chosen.chat() if chosen else None,
        )

    def with_defaults(self, defaults: SamplingParams) -> "ResponsesRequest":
        """Return the body with default sampling parameters instead of nulls."""
        return self.model_copy(
            update={
                name: getattr(defaults, name)
                for name in ("temperature", "top_p")
                if getattr(self, name) is None
            }
        )

    def tells_logprobs(self) -> bool:
        if self.include is None:
            return bool(self.top_logprobs)
        return LOGPROBS in self.include

    def left_out_tools(self) -> set[str]:
        return left_out_tools(self.tools or ())

    def left_out_items(self) -> set[str]:
        return set() if isinstance(self.input, str) else left_out_items(self.input)

    def name_here(self, field: str) -> str:
        if self.text and self.text.format and field.startswith("structured_outputs"):
            return "text.format.schema"
        return named_as_sent_tool(rename(field, _NAMES_HERE), self.tools or ())
