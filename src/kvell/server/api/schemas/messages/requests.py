"""The bodies of ``/v1/messages``, and their translation to chat requests."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, ValidationError
from typing_extensions import override

from kvell.engine.protocol.schemas.references import Schema
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from kvell.server.api.schemas.formats import schema_format
from kvell.server.api.schemas.messages.turns import (
    PLACE,
    CacheControl,
    MessageTurn,
    SystemBlocks,
    cache_controls,
    conversation,
)
from kvell.server.api.schemas.other_fields import names_of, others_of
from kvell.server.api.schemas.request_body import RequestBody, RequestPart
from kvell.server.api.schemas.sampling_fields import (
    MAX_INT32,
    Count,
    DeadlineSeconds,
    ScheduledRequest,
    StopTexts,
)

_SAME = tuple(
    (
        "model stream temperature top_p top_k min_p seed cache_salt prompt_cache_key priority "
        "deadline_seconds"
    ).split()
)
"""Fields that chat has under the same name."""
CHOICES: dict[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}
"""Chat's names of the choices of a tool."""


class ToolChoiceField(RequestPart):
    """The tools that the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    """``any`` is one of the tools, ``tool`` the named one."""
    name: str | None = Field(default=None, max_length=256)
    """With the type ``tool``: name of the tool."""
    disable_parallel_tool_use: bool | None = None
    """With ``any``: whether only one call is allowed."""


class ThinkingField(RequestPart):
    """The thinking before an answer; the chat template decides if the field is absent.

    The template receives whether thinking is on as ``enable_thinking`` and as ``thinking``.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    """``adaptive`` is ``enabled`` without a budget."""
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Maximum tokens of thinking; the answer follows then."""
    display: Literal["summarized", "omitted"] | None = None
    """``omitted`` leaves out the text of thinking; otherwise the answer has the whole text."""


class SchemaFormat(RequestPart):
    """A constraint of the answer's text."""

    type: Literal["json_schema"]
    # Not "schema": pydantic's models have a method of that name.
    json_schema: Schema = Field(alias="schema")
    """The schema that the text follows."""


class OutputConfig(RequestPart):
    """Options of the answer."""

    effort: str | None = Field(default=None, max_length=32)
    """Passed to the chat template as ``reasoning_effort``."""
    format: SchemaFormat | None = None
    """Constraint of the answer's text."""


class CountTokensRequest(RequestBody):
    """Body of ``/v1/messages/count_tokens``."""

    others = others_of("messages")
    names = names_of("messages")

    model: str
    messages: Annotated[
        list[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)
    ]
    """The conversation so far, oldest first.  The answer continues a last turn of the assistant."""
    system: str | SystemBlocks | None = None
    """A system message before the conversation."""
    tools: Annotated[list[Schema], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Tools that may be called: ``{"name": …, "description": …, "input_schema": …}``."""
    tool_choice: ToolChoiceField | None = None
    """The tools that the answer may or must call; ``auto`` if null."""
    thinking: ThinkingField | None = None
    """Whether the model thinks before it answers, and how long."""
    output_config: OutputConfig | None = None
    """Options of the answer."""
    cache_control: CacheControl | None = None
    """A mark that a later request will begin with the whole prompt."""
    chat_template_kwargs: Annotated[dict[str, object], Field(max_length=62)] | None = None
    """Further variables of the chat template."""

    def chat(self) -> ChatRequest:
        """Return the equivalent request to chat completions.

        :raises ChangeSomething: if the request needs something that is not supported.
        """
        return ChatRequest.model_validate(self._chat_fields())

    @override
    def name_sent(self, field: str) -> str:
        match = PLACE.fullmatch(field)
        if match is None:
            return super().name_sent(field)
        turns = conversation(self.system, self.messages)
        return turns.name_here(int(match[1]), match[2] or "")

    def _chat_fields(self) -> Schema:
        turns = conversation(self.system, self.messages)
        ending = {"add_generation_prompt": False, "continue_final_message": True}
        config, chosen = self.output_config, self.tool_choice
        form = self.output_config and self.output_config.format
        return {
            "model": self.model,
            "messages": turns.messages,
            **(ending if turns.is_begun else {}),
            "tools": self.tools and [_tool(i, tool) for i, tool in enumerate(self.tools)],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": False if chosen and chosen.disable_parallel_tool_use else None,
            "chat_template_kwargs": self._template_fields(),
            "reasoning_effort": config and config.effort,
            "thinking_token_budget": self.thinking and self.thinking.budget_tokens,
            "response_format": form and schema_format(form.json_schema),
            **self._cache_hints(),
        }

    def _tool_choice(self) -> str | Schema | None:
        chosen = self.tool_choice
        if chosen is None:
            return None
        if chosen.type in ("any", "tool") and not self.tools:
            raise ChangeSomething("tool_choice.type", chosen.type, "needs tools", "send tools")
        if chosen.type != "tool":
            return CHOICES[chosen.type]
        if chosen.name is None:
            raise ChangeSomething("tool_choice.name", None, "is missing", "name one of the tools")
        return {"type": "function", "function": {"name": chosen.name}}

    def _template_fields(self) -> dict[str, object] | None:
        if self.thinking is None:
            return self.chat_template_kwargs
        is_on = self.thinking.type != "disabled"
        return {"enable_thinking": is_on, "thinking": is_on, **(self.chat_template_kwargs or {})}

    def _cache_hints(self) -> Schema:
        marks = [self.cache_control, *cache_controls(self.system)]
        marks += [mark for turn in self.messages for mark in cache_controls(turn.content)]
        marks += [_tool_mark(i, tool) for i, tool in enumerate(self.tools or ())]
        return {"will_return": True} if any(mark is not None for mark in marks) else {}


class MessagesRequest(CountTokensRequest, ScheduledRequest):
    """Body of ``/v1/messages``, with some of vLLM's extensions."""

    max_tokens: Count
    """Maximum output tokens, including thinking; at least 1."""
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    stop_sequences: StopTexts | None = None
    """The answer ends before the first of these texts."""

    min_p: float | None = None
    seed: int | None = None
    deadline_seconds: DeadlineSeconds | None = None
    will_return: StrictBool | None = None
    """Whether the conversation continues; true if null and there is a cache control."""

    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def _chat_fields(self) -> Schema:
        hints = {} if self.will_return is None else {"will_return": self.will_return}
        return {
            **super()._chat_fields(),
            **{name: getattr(self, name) for name in _SAME},
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            **hints,
        }


def _tool(number: int, tool: Schema) -> Schema:
    """Return a tool in the format of chat.

    :raises ChangeSomething: if Anthropic defines the tool.
    """
    kind = tool.get("type")
    if kind not in (None, "custom"):
        problem = "is a tool that Anthropic defines, which is not served"
        remedy = "describe it by name, description and input_schema, without a type"
        raise ChangeSomething(f"tools[{number}].type", str(kind)[:64], problem, remedy)
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_mark(number: int, tool: Schema) -> CacheControl | None:
    mark = tool.get("cache_control")
    try:
        return None if mark is None else CacheControl.model_validate(mark)
    except ValidationError:
        field = f"tools[{number}].cache_control"
        remedy = 'use {"type": "ephemeral"}'
        raise ChangeSomething(field, "…", "is not cache control", remedy) from None
