"""``tool_choice``: its values, and answers that are constrained to be calls.

The forms are vLLM's: for ``required`` a list of calls, for a named function its arguments alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvell.engine.protocol.schemas.references import Schema, within
from kvell.engine.protocol.schemas.strict import StrictPart
from kvell.errors import ChangeSomething
from kvell.server.answers.reading.json_calls import ArgumentsObject, CallObject
from kvell.server.answers.reading.markers import Expect
from kvell.server.answers.reading.modes import Chain, Mode, PlainText

Tools = Sequence[Schema]
_SAYS_NOTHING = frozenset(("type", "title", "description", "$schema", "$defs", "definitions"))
"""Schema keywords that do not describe arguments."""


@dataclass(frozen=True)
class NamedFunction:
    """The one function that must be called."""

    name: str


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction


def tool_choice(value: object, tools: Tools) -> ToolChoice:
    """Return the meaning of a request's ``tool_choice``.

    :param value: value of the JSON field; None means ``auto`` if there are tools, else ``none``.
    :raises ChangeSomething: if OpenAI has no such value, or no tool matches it.
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
                "tool_choice.function.name", name[:64], "is not one of the tools", remedy
            )
        case "required":
            raise ChangeSomething("tool_choice", value, "needs tools", "send tools")
    remedy = 'use "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    raise ChangeSomething("tool_choice", str(value)[:64], "is not known", remedy)


def forced_schema(choice: ToolChoice, tools: Tools, *, parallel: bool = True) -> Schema | None:
    """Return the JSON schema that the answer must match; None if the answer is free.

    :param parallel: whether the answer may have several calls.
    """
    if isinstance(choice, NamedFunction):
        return arguments_schema(tools[_names(tools).index(choice.name)])
    if choice != "required":
        return None
    calls = []
    definitions = {}
    for i, tool in enumerate(tools):
        arguments = arguments_schema(tool)
        place = f"#/$defs/{i}"
        moved = within(arguments, place)
        if moved is not arguments:  # its references point to the whole schema in $defs
            definitions[str(i)] = moved
            arguments = {"$ref": place}
        calls.append(call_schema(tool["function"]["name"], arguments))
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    more = {"$defs": definitions} if definitions else {}
    return schema | ({} if parallel else {"maxItems": 1}) | more


def strict_parts(choice: ToolChoice, tools: Tools) -> tuple[StrictPart, ...]:
    """Return the parts of :func:`forced_schema` that are schemas of strict functions."""
    fields = {
        i: f"tools[{i}].function.parameters"
        for i, tool in enumerate(tools)
        if tool["function"].get("strict")
    }
    if isinstance(choice, NamedFunction):
        i = _names(tools).index(choice.name)
        return (StrictPart("", fields[i]),) if i in fields else ()
    return tuple(
        StrictPart(path, field)
        for i, field in fields.items()
        for path in (f"items.anyOf[{i}].properties.parameters.", f"$defs.{i}.")
    )


def arguments_schema(tool: Schema) -> Schema:
    """Return the schema of a function's arguments; a function without any gets an empty object."""
    parameters: Schema = {"type": "object"} | (tool["function"].get("parameters") or {})
    keywords = {key for key, value in parameters.items() if key != "required" or value}
    return parameters if keywords - _SAYS_NOTHING else parameters | {"properties": {}}


def call_schema(name: str, arguments: Schema) -> Schema:
    """Return the schema of a call of one function, with the schema of its arguments."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def schema_field(choice: ToolChoice, tools: Tools) -> str:
    """Return the request's field that has the schema of :func:`forced_schema`; for errors."""
    if isinstance(choice, NamedFunction):
        return f"tools[{_names(tools).index(choice.name)}].function.parameters"
    return "tools"


def forced_tool_calls(choice: ToolChoice) -> Mode | None:
    """Return the mode that reads an answer of :func:`forced_schema`; None if the answer is free.

    It is meant for :meth:`kvell.server.answers.named.AnswerFormat.parser`.
    """
    if isinstance(choice, NamedFunction):
        return _OneCall(choice.name)
    return _ListOfCalls() if choice == "required" else None


class _OneCall(Chain):
    """The arguments of the named function, such as ``{"city": "Bern"}``."""

    def __init__(self, name: str) -> None:
        super().__init__(ArgumentsObject(0, name))

    def _next(self, ended: Mode) -> Mode:
        return PlainText(drops_blank=isinstance(ended, ArgumentsObject) and ended.begun)


class _ListOfCalls(Chain):
    """A list of calls, ``[{"name": "weather", "parameters": {"city": "Bern"}}, …]``."""

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
