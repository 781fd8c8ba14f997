"""The body of ``/v1/responses``, and its translation to a chat request.

Its functions are offered to the model.  Tools of other types, which agents such as Codex send in
every request, are left out: a local server has none of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import override

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.schemas.references import Schema
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ImagePart,
    ImageUrl,
    Part,
    RefusalPart,
    TextPart,
    ToolCallMessage,
    Tools,
)
from kvell.server.api.schemas.formats import (
    JsonSchemaFormat,
    ResponseFormat,
)
from kvell.server.api.schemas.other_fields import names_of, others_of
from kvell.server.api.schemas.request_body import RequestPart
from kvell.server.api.schemas.sampling_fields import Count, SamplingFields

FUNCTION = "function"
_PLACE = re.compile(r"tools\[(\d+)\]")

Tool = Mapping[str, Any]


def chat_functions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the functions in the format of chat, which refuses a type that is not a text."""
    kept = [tools[place] for place in _kept(tools)]
    return [
        {"type": FUNCTION, "function": tool} if _type(tool) == FUNCTION else {"type": _type(tool)}
        for tool in kept
    ]


def left_out_tools(tools: Sequence[Tool]) -> set[str]:
    return {str(_type(tool)) for tool in tools if _is_left_out(tool)}


def named_as_sent_tool(field: str, tools: Sequence[Tool]) -> str:
    """Return a field's name with the index of its tool among all sent tools."""
    match = _PLACE.match(field)
    if match is None:
        return field
    kept = _kept(tools)
    place = int(match[1])
    return f"tools[{kept[place]}]{field[match.end() :]}" if place < len(kept) else field


def chat_choice(
    choice: str | dict[str, Any] | None, tools: Sequence[Tool]
) -> str | dict[str, Any] | None:
    """Return ``tool_choice`` in the format of chat.

    :raises ChangeSomething: if ``choice`` is not known, or forces a tool that is left out.
    """
    match choice:
        case "required" if tools and not _kept(tools):
            remedy = 'use "auto", or send tools of type "function"'
            raise ChangeSomething("tool_choice", choice, "forces tools that are left out", remedy)
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": FUNCTION, "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            return _allowed(mode, allowed, left_out_tools(tools))
        case {"type": str(kind)} if kind in left_out_tools(tools):
            remedy = 'use "auto", or force a function'
            raise ChangeSomething(
                "tool_choice", kind[:64], "forces a tool that is left out", remedy
            )
    remedy = (
        'use "none", "auto", "required", {"type": "function", "name": …} or'
        ' {"type": "allowed_tools", "mode": "auto", "tools": […]}'
    )
    shown = choice[:64] if isinstance(choice, str) else "…"
    raise ChangeSomething("tool_choice", shown, "is not known", remedy)


def _allowed(mode: object, allowed: Sequence[object], left_out: set[str]) -> dict[str, object]:
    functions = [
        {"type": FUNCTION, "function": {"name": tool.get("name")}}
        if isinstance(tool, Mapping) and _type(tool) == FUNCTION
        else tool
        for tool in allowed
        if not (isinstance(tool, Mapping) and _type(tool) in left_out)
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def _kept(tools: Sequence[Tool]) -> list[int]:
    return [place for place, tool in enumerate(tools) if not _is_left_out(tool)]


def _is_left_out(tool: Tool) -> bool:
    kind = _type(tool)
    return isinstance(kind, str) and kind != FUNCTION


def _type(tool: Tool) -> object:
    """Return the type of a tool; a tool without a type is a function, as in chat."""
    kind = tool.get("type")
    return FUNCTION if kind is None else kind


OTHER_TOOLS = "*_call"
"""The kind of the items of all tools that are not functions."""
_FUNCTION_ITEMS = ("function_call", "function_call_output")
_ENDS_OF_OTHER_TOOLS = ("_call", "_output")
_OTHER_TOOLS = frozenset(
    (
        "additional_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "program",
    )
)
"""Types of such items with endings that are not in ``_ENDS_OF_OTHER_TOOLS``."""


class InputImage(RequestPart):
    """An image part of a message: a data URL."""

    type: Literal["input_image"]
    image_url: str
    """A ``data:`` URL; no other is fetched."""
    detail: str | None = None
    """Accepted and not used."""


InputPart = Annotated[TextPart | InputImage | RefusalPart, Field(discriminator="type")]
InputParts = Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(RequestPart):
    """A message; its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    """Author of the message."""
    content: str | InputParts
    """A text, or parts that are joined."""


class FunctionCallItem(RequestPart):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    """Id of the call; its output refers to it."""
    name: str = Field(max_length=256)
    """Name of the function."""
    arguments: object = ""
    """Its arguments, as JSON text; passed on as the model wrote them, even if incomplete."""


class FunctionCallOutputItem(RequestPart):
    """The output of a called function."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    """Id of the call whose output this is."""
    output: str | InputParts
    """A text, or parts that are joined."""


class ReasoningItem(RequestPart):
    """The reasoning of an earlier answer; it is dropped, as chat templates do not need it."""

    type: Literal["reasoning"]


class OtherToolItem(RequestPart):
    """A call of a tool that is not a function, or its output."""

    model_config = ConfigDict(extra="ignore")

    type: str
    """Type of the item, such as ``web_search_call`` or ``custom_tool_call_output``."""


def item_kind(item: Any) -> str | None:
    """Return the kind of an item: its type, or ``OTHER_TOOLS``; a message need not have a type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    if not isinstance(kind, str):
        return None
    is_other = kind.endswith(_ENDS_OF_OTHER_TOOLS) or kind in _OTHER_TOOLS
    return OTHER_TOOLS if is_other and kind not in _FUNCTION_ITEMS else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherToolItem, Tag(OTHER_TOOLS)],
    Discriminator(item_kind),
]


def chat_messages(instructions: str | None, items: str | Sequence[InputItem]) -> list[ChatMessage]:
    """Return the chat messages of an input.

    Calls become a part of the preceding message of the assistant.

    :param instructions: content of a system message at the beginning.
    :raises ChangeSomething: if there is no message, or an answer has too many calls.
    """
    messages: list[ChatMessage] = []
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    if isinstance(items, str):
        return [*messages, ChatMessage(role="user", content=items)]
    for item in items:
        match item:
            case MessageItem(role=role, content=content):
                messages.append(ChatMessage(role=role, content=_content(content)))
            case FunctionCallItem():
                _add_call(messages, item)
            case FunctionCallOutputItem(call_id=call_id, output=output):
                messages.append(
                    ChatMessage(role="tool", tool_call_id=call_id, content=_content(output))
                )
    if not messages:
        raise ChangeSomething("input", "[…]", "has no message", "send a message or a text")
    return messages


def _content(content: str | InputParts) -> str | list[Part]:
    if isinstance(content, str):
        return content
    return [_part(part) for part in content]


def _part(part: InputPart) -> Part:
    if isinstance(part, InputImage):
        image = ImageUrl(url=part.image_url, detail=part.detail)
        return ImagePart(type="image_url", image_url=image)
    return part


def _add_call(messages: list[ChatMessage], item: FunctionCallItem) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    function = CalledFunction(name=item.name, arguments=item.arguments)
    calls = [*(messages[-1].tool_calls or ()), ToolCallMessage(id=item.call_id, function=function)]
    if len(calls) > MAX_TOOLS:
        problem = "has too many calls in one answer"
        remedy = f"send at most {MAX_TOOLS}"
        raise ChangeSomething("input", f"{len(calls)} calls", problem, remedy)
    messages[-1].tool_calls = calls


LOGPROBS = "message.output_text.logprobs"
_SAME = (
    *SamplingFields.model_fields,
    "parallel_tool_calls",
    "chat_template_kwargs",
    "thinking_token_budget",
)
"""Fields that chat has under the same name."""


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

    others = others_of("everywhere", "responses")
    names = names_of("responses")

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
    tools: Tools | None = None
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
        items = () if isinstance(self.input, str) else self.input
        return {item.type for item in items if isinstance(item, OtherToolItem)}

    @override
    def name_sent(self, field: str) -> str:
        if self.text and self.text.format and field.startswith("structured_outputs"):
            return "text.format.schema"
        return named_as_sent_tool(super().name_sent(field), self.tools or ())
