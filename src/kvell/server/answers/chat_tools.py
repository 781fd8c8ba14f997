"""Checks of the ``tools`` of a request: OpenAI's functions, within bounds."""

import re
from collections.abc import Mapping
from typing import Any

from kvell.errors import ChangeSomething

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
