"""Items of the ``input`` of ``/v1/responses``, and the chat messages that they are."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import (
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ImagePart,
    ImageUrl,
    Part,
    RefusalPart,
    TextPart,
    ToolCallMessage,
)
from kvell.server.api.schemas.request_body import RequestPart

OTHER_TOOLS = "*_call"
"""The kind of items of all tools that are no functions."""
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
"""Items of tools whose types end otherwise."""


class InputImage(RequestPart):
    """A piece of a message that is an image: a data URL."""

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
    """Who speaks."""
    content: str | InputParts
    """A text, or parts that are joined."""


class FunctionCallItem(RequestPart):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    """Id of the call, which its output names."""
    name: str = Field(max_length=256)
    """Name of the function."""
    arguments: object = ""
    """Its arguments, as JSON text.  Whatever the model wrote is passed on, half an object too."""


class FunctionCallOutputItem(RequestPart):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    """The call that this is the output of."""
    output: str | InputParts
    """A text, or parts that are joined."""


class ReasoningItem(RequestPart):
    """What an earlier answer thought; chat templates do not want it again."""

    type: Literal["reasoning"]


class OtherToolItem(RequestPart):
    """A call of a tool that is no function, or its output."""

    model_config = ConfigDict(extra="ignore")

    type: str
    """Such as ``web_search_call`` or ``custom_tool_call_output``."""


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


def left_out_items(items: Sequence[InputItem]) -> set[str]:
    """Return the types of items that are left out."""
    return {item.type for item in items if isinstance(item, OtherToolItem)}


def chat_messages(instructions: str | None, items: str | Sequence[InputItem]) -> list[ChatMessage]:
    """The conversation that an input is.

    Calls belong to the message of the assistant before them.

    :param instructions: come first, as a system message.
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
        problem, remedy = "has too many calls in one answer", f"send at most {MAX_TOOLS}"
        raise ChangeSomething("input", f"{len(calls)} calls", problem, remedy)
    messages[-1].tool_calls = calls
