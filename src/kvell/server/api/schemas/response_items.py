"""Items of the ``input`` of ``/v1/responses``, and their translation to chat messages."""

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


def left_out_items(items: Sequence[InputItem]) -> set[str]:
    return {item.type for item in items if isinstance(item, OtherToolItem)}


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
