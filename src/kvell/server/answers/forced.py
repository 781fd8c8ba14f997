"""``tool_choice``: what a client chose, and answers that are forced to be calls.

The forms are vLLM's: for ``required`` a list of calls, for a named function its arguments alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvell.engine.protocol.schemas.following import check_strict
from kvell.engine.protocol.schemas.references import Schema, within
from kvell.errors import ChangeSomething
from kvell.server.answers.reading.json_calls import ArgumentsObject, CallObject
from kvell.server.answers.reading.markers import Expect
from kvell.server.answers.reading.modes import Chain, Mode, PlainText

Tools = Sequence[Schema]
_SAYS_NOTHING = frozenset(("type", "title", "description", "$schema", "$defs", "definitions"))
"""Keywords that name no arguments."""


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


def forced_schema(choice: ToolChoice, tools: Tools, *, parallel: bool = True) -> Schema | None:
    """The JSON schema that the answer must obey; None if it is free.

    :param parallel: whether there may be several calls.
    :raises ChangeSomething: if a function is strict and its calls cannot be held to its schema.
    """
    if isinstance(choice, NamedFunction):
        place = _names(tools).index(choice.name)
        _check_strict(place, tools[place])
        return arguments_schema(tools[place])
    if choice != "required":
        return None
    calls, definitions = [], {}
    for i, tool in enumerate(tools):
        _check_strict(i, tool)
        name, arguments = tool["function"]["name"], arguments_schema(tool)
        moved = within(arguments, f"#/$defs/{name}")
        if moved != arguments:  # its references lead to where it is whole
            definitions[name], arguments = moved, {"$ref": f"#/$defs/{name}"}
        calls.append(call_schema(name, arguments))
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    more = {"$defs": definitions} if definitions else {}
    return schema | ({} if parallel else {"maxItems": 1}) | more


def arguments_schema(tool: Schema) -> Schema:
    """The schema of a function's arguments: without any properties, of an empty object."""
    parameters: Schema = {"type": "object"} | (tool["function"].get("parameters") or {})
    told = {key for key, value in parameters.items() if key != "required" or value}
    return parameters if told - _SAYS_NOTHING else parameters | {"properties": {}}


def call_schema(name: str, arguments: Schema) -> Schema:
    """The schema of a call of one function, with that of its arguments."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def schema_field(choice: ToolChoice, tools: Tools) -> str:
    """The field that the schema of :func:`forced_schema` came in."""
    if isinstance(choice, NamedFunction):
        return f"tools[{_names(tools).index(choice.name)}].function.parameters"
    return "tools"


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


def _check_strict(place: int, tool: Schema) -> None:
    if tool["function"].get("strict"):
        check_strict(arguments_schema(tool), f"tools[{place}].function.parameters")
