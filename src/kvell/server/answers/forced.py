"""``tool_choice``: what a client chose, and answers that are forced to be calls.

The forms are vLLM's: for ``required`` a list of calls, for a named function its arguments alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvell.errors import ChangeSomething
from kvell.server.answers.reading.json_calls import ArgumentsObject, CallObject
from kvell.server.answers.reading.markers import Expect
from kvell.server.answers.reading.modes import Chain, Mode, PlainText

Tools = Sequence[Mapping[str, Any]]
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class NamedFunction:
    """The one function that must be called."""

    name: str


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction


def tool_choice(value: object, tools: Tools) -> ToolChoice:
    """What a request's ``tool_choice`` means.

    :param value: as it came; None means ``auto`` if there are tools, else ``none``.
    :param tools: checked already.
    :raises ChangeSomething: if it is none that OpenAI knows, or no tool fits it.
    """
    match value:
        case None:
            return "auto" if tools else "none"
        case "none" | "auto":
            return value
        case "required" if tools:
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            if name in _names(tools):
                return NamedFunction(name)
            remedy = f"use one of {', '.join(_names(tools))}" if tools else "send tools"
            raise ChangeSomething(
                "tool_choice.function.name", name[:64], "is none of the tools", remedy
            )
        case "required":
            raise ChangeSomething("tool_choice", value, "needs tools", "send tools")
    remedy = 'use "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    raise ChangeSomething("tool_choice", str(value)[:64], "is not known", remedy)


def forced_schema(
    choice: ToolChoice, tools: Tools, *, parallel: bool = True
) -> dict[str, Any] | None:
    """The JSON schema that the answer must obey; None if it is free.

    :param parallel: whether there may be several calls.
    :raises ChangeSomething: if tools define different schemas under one name.
    """
    if isinstance(choice, NamedFunction):
        return dict(_parameters(tools[_names(tools).index(choice.name)]))
    if choice != "required":
        return None
    calls = [_call_schema(tool) for tool in tools]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | ({} if parallel else {"maxItems": 1}) | _definitions(tools)


def forced_tool_calls(choice: ToolChoice) -> Mode | None:
    """What reads an answer that obeys :func:`forced_schema`; None if it is free.

    It is meant for :meth:`kvell.server.answers.named.AnswerFormat.parser`.
    """
    if isinstance(choice, NamedFunction):
        return _OneCall(choice.name)
    return _ListOfCalls() if choice == "required" else None


class _OneCall(Chain):
    """``{"city": "Bern"}``: the arguments of a function whose name is known."""

    def __init__(self, name: str) -> None:
        super().__init__(ArgumentsObject(0, name))

    def _next(self, ended: Mode) -> Mode:
        return PlainText(drops_blank=isinstance(ended, ArgumentsObject) and ended.begun)


class _ListOfCalls(Chain):
    """``[{"name": "weather", "parameters": {"city": "Bern"}}, …]``."""

    def __init__(self) -> None:
        super().__init__(Expect("[", keeps_blank=True))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case Expect(marker="[" | ","):
                return CallObject(self._calls, ended.opening)
            case CallObject(begun=True):
                self._calls += 1
                return Expect(",", "]")
            case _:
                return PlainText(drops_blank=self._calls > 0)


def _names(tools: Tools) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] | None = tool["function"].get("parameters")
    return parameters or {"type": "object", "properties": {}}


def _call_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: part for key, part in _parameters(tool).items() if key not in _DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "parameters": inner},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(tools: Tools) -> dict[str, Any]:
    """All tools' definitions at the root, where ``#/$defs/…`` looks for them."""
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        for key in _DEFINITIONS:
            for name, schema in (_parameters(tool).get(key) or {}).items():
                if found.setdefault(key, {}).setdefault(name, schema) != schema:
                    field = f"tools[{i}].function.parameters.{key}.{name}"
                    problem = "differs from another tool's definition of that name"
                    raise ChangeSomething(field, "…", problem, "give it another name")
    return dict(found)
