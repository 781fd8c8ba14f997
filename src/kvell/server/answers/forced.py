"""``tool_choice``: its values, and answers that are constrained to be calls.

The forms are vLLM's: for ``required`` a list of calls, for a named function its arguments alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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


@dataclass(frozen=True)
class AllowedFunctions:
    """The functions that may be called; the model sees no others."""

    names: frozenset[str]
    is_required: bool


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


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
            _check_name("tool_choice.function.name", name, tools)
            return NamedFunction(name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            return _allowed(mode, allowed, tools)
        case "required":
            raise ChangeSomething("tool_choice", value, "needs tools", "send tools")
    remedy = (
        'use "none", "auto", "required", {"type": "function", "function": {"name": …}} or'
        ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}'
    )
    raise ChangeSomething("tool_choice", str(value)[:64], "is not known", remedy)


def _allowed(mode: object, allowed: Sequence[object], tools: Tools) -> AllowedFunctions:
    """Return the functions that a request allows.

    :raises ChangeSomething: if the mode is not known, or one is no function of the request.
    """
    place = "tool_choice.allowed_tools"
    if mode not in ("auto", "required"):
        remedy = 'use "auto" or "required"'
        raise ChangeSomething(f"{place}.mode", str(mode)[:64], "is not known", remedy)
    names = set()
    for i, tool in enumerate(allowed):
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                _check_name(f"{place}.tools[{i}].function.name", name, tools)
                names.add(name)
            case _:
                remedy = 'use {"type": "function", "function": {"name": …}}'
                raise ChangeSomething(f"{place}.tools[{i}]", "…", "is not a function", remedy)
    if mode == "required" and not names:
        raise ChangeSomething(f"{place}.tools", "[]", "has no function to call", "name one")
    return AllowedFunctions(frozenset(names), mode == "required")


def _check_name(field: str, name: str, tools: Tools) -> None:
    if name in _names(tools):
        return
    remedy = f"use one of {', '.join(_names(tools))}" if tools else "send tools"
    raise ChangeSomething(field, name[:64], "is not one of the tools", remedy)


def callable_tools(choice: ToolChoice, tools: Tools) -> list[Schema]:
    if choice == "none":
        return []
    if isinstance(choice, AllowedFunctions):
        return [tool for tool in tools if tool["function"]["name"] in choice.names]
    return list(tools)


def forced_schema(choice: ToolChoice, tools: Tools, *, parallel: bool = True) -> Schema | None:
    """Return the JSON schema that the answer must match; None if the answer is free."""
    if isinstance(choice, NamedFunction):
        return arguments_schema(tools[_names(tools).index(choice.name)])
    if not _is_required(choice):
        return None
    calls = []
    definitions = {}
    for i, tool in enumerate(callable_tools(choice, tools)):
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
        tool["function"]["name"]: f"tools[{i}].function.parameters"
        for i, tool in enumerate(tools)
        if tool["function"].get("strict")
    }
    if isinstance(choice, NamedFunction):
        return (StrictPart("", fields[choice.name]),) if choice.name in fields else ()
    return tuple(
        StrictPart(path, fields[name])
        for i, name in enumerate(_names(callable_tools(choice, tools)))
        if name in fields
        for path in (f"items.anyOf[{i}].properties.parameters.", f"$defs.{i}.")
    )


def arguments_schema(tool: Schema) -> Schema:
    """Return the schema of a function's arguments; a function without any gets an empty object."""
    parameters: Schema = {"type": "object"} | (tool["function"].get("parameters") or {})
    keywords = {key for key, value in parameters.items() if key != "required" or value}
    return parameters if keywords - _SAYS_NOTHING else parameters | {"properties": {}}


def call_schema(name: str, arguments: Schema) -> Schema:
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
    return _ListOfCalls() if _is_required(choice) else None


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


def _is_required(choice: ToolChoice) -> bool:
    return choice == "required" or (isinstance(choice, AllowedFunctions) and choice.is_required)


def _names(tools: Tools) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]


MOST_TOOLS = 128
MOST_DESCRIPTION_CHARS = 65536
DEEPEST_SCHEMA = 32
MOST_SCHEMA_PARTS = 10_000
MOST_SCHEMA_CHARS = 262_144
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def chat_tools(tools: object) -> list[dict[str, Any]]:
    """Check tools and return them in the form that chat templates expect.

    :param tools: value of the JSON field; None means no tools.
    :raises ChangeSomething: with the wrong field, such as ``tools[3].function.name``.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _refusal("tools", tools, "is not a list", "send a list of functions")
    if len(tools) > MOST_TOOLS:
        problem = "is out of range"
        remedy = f"send at most {MOST_TOOLS}"
        raise ChangeSomething("tools", f"{len(tools)} tools", problem, remedy)
    checked = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    seen: set[str] = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in seen:
            field = f"tools[{i}].function.name"
            raise _refusal(field, name, "occurs twice", "give each function its own name")
        seen.add(name)
    return checked


def _tool(field: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _refusal(field, tool, "is not an object", 'send {"type": "function", "function": …}')
    if (tool.get("type") or "function") != "function":
        raise _refusal(f"{field}.type", tool.get("type"), "is not served", 'use "function"')
    function = tool.get("function")
    field += ".function"
    if not isinstance(function, Mapping):
        raise _refusal(field, function, "is not an object", 'send {"name": …, "parameters": …}')
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        remedy = "use 1 to 64 letters, digits, underscores, hyphens and dots"
        raise _refusal(f"{field}.name", name, "is not a name", remedy)
    if description is not None and not isinstance(description, str):
        raise _refusal(f"{field}.description", description, "is not text", "send a string")
    if description is not None and len(description) > MOST_DESCRIPTION_CHARS:
        remedy = f"use at most {MOST_DESCRIPTION_CHARS} characters"
        raise _refusal(f"{field}.description", description, "is too long", remedy)
    if not isinstance(function.get("strict"), bool | None):
        raise _refusal(f"{field}.strict", function["strict"], "is not a boolean", "use true")
    _check_parameters(f"{field}.parameters", function.get("parameters"))
    given = {key: function[key] for key in _FUNCTION_FIELDS if function.get(key) is not None}
    return {"type": "function", "function": given}


def _check_parameters(field: str, parameters: object) -> None:
    """Refuse parameters that are not an object's schema or too large for a grammar."""
    if parameters is None or parameters == {}:
        return
    if not isinstance(parameters, Mapping):
        raise _refusal(field, parameters, "is not an object", "send a JSON schema")
    if parameters.get("type", "object") != "object":
        kind = parameters["type"]
        raise _refusal(f"{field}.type", kind, "cannot hold arguments", 'use "object"')
    if not isinstance(parameters.get("properties", {}), Mapping):
        properties = parameters["properties"]
        raise _refusal(f"{field}.properties", properties, "is not an object", "name schemas")
    for key in ("$defs", "definitions"):
        if not isinstance(parameters.get(key, {}), Mapping):
            raise _refusal(f"{field}.{key}", parameters[key], "is not an object", "name schemas")
    _check_size(field, parameters)


def _check_size(field: str, schema: Mapping[str, Any]) -> None:
    level: list[object] = [schema]
    depth = parts = chars = 0
    while level:
        depth += 1
        parts += len(level)
        chars += sum(len(part) for part in level if isinstance(part, str))
        if depth > DEEPEST_SCHEMA:
            remedy = f"nest at most {DEEPEST_SCHEMA} levels"
            raise ChangeSomething(field, "{…}", "is nested too deeply", remedy)
        if parts > MOST_SCHEMA_PARTS or chars > MOST_SCHEMA_CHARS:
            remedy = f"use at most {MOST_SCHEMA_PARTS} parts and {MOST_SCHEMA_CHARS} characters"
            raise ChangeSomething(field, "{…}", "is too large", remedy)
        level = [inner for part in level for inner in _inside(part)]


def _inside(part: object) -> list[object]:
    if isinstance(part, Mapping):
        return [*part.keys(), *part.values()]
    return list(part) if isinstance(part, list) else []


def _refusal(field: str, value: object, problem: str, remedy: str) -> ChangeSomething:
    """Return an error that shows at most 64 characters of a value."""
    shown = value if isinstance(value, bool | int | float | None) else type(value).__name__
    return ChangeSomething(field, value[:64] if isinstance(value, str) else shown, problem, remedy)
