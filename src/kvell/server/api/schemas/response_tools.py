"""The tools of ``/v1/responses``: functions are offered, and other tools are left out.

Agents such as Codex send tools of other types in every request; a local server has none of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvell.errors import ChangeSomething

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
