"""Replacement of keywords that no grammar supports; those without equivalent are reported.

Removing a keyword makes a schema allow more than before, never less.
"""

from collections.abc import Callable, Mapping

from kvell.engine.protocol.schemas.ecmascript import rust_pattern
from kvell.engine.protocol.schemas.references import Document, Schema

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that llguidance enforces; all others are annotations."""
UNFOLLOWED = tuple(
    (
        "if then else dependentRequired dependentSchemas dependencies contains minContains "
        "maxContains $dynamicRef $recursiveRef"
    ).split()
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_IN_PLACE = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}

Tell = Callable[[str], None]
"""A callback that receives a keyword which is not enforced."""


def plain(schema: Schema, document: Document, tell: Tell) -> Schema:
    """Return a schema without unsupported keywords; inner schemas stay as they are."""
    resolve = document.resolve
    out = {key: value for key, value in schema.items() if key not in UNFOLLOWED}
    for key in schema:
        if key in UNFOLLOWED:
            tell(key)
    if not ({"type", "enum", "const"} | _IN_PLACE) & out.keys():
        implied = [kind for key, kind in _IMPLIED.items() if isinstance(out.get(key), dict | list)]
        out |= {"type": implied[0]} if implied else {}
    _texts(out, tell)
    if "not" in out:
        _negation(out, resolve(out.pop("not")), document, tell)
    if "propertyNames" in out:
        _property_names(out, resolve(out.pop("propertyNames")), document, tell)
    if out.pop("uniqueItems", False) is True:
        _unique_items(out, resolve(out.get("items")), tell)
    if "unevaluatedItems" in out:
        _unevaluated_items(out, out.pop("unevaluatedItems"), tell)
    return out


def _texts(out: Schema, tell: Tell) -> None:
    if isinstance(out.get("format"), str) and out["format"] not in FORMATS:
        del out["format"]
        tell("format")
    pattern, patterns = out.get("pattern"), out.get("patternProperties")
    if isinstance(pattern, str):
        if (equivalent := rust_pattern(pattern)) is None:
            del out["pattern"]
            tell("pattern")
        else:
            out["pattern"] = equivalent
    if isinstance(patterns, dict):
        equivalents = {key: rust_pattern(key) for key in patterns}
        supported = {
            equivalent: patterns[key]
            for key, equivalent in equivalents.items()
            if equivalent is not None
        }
        out["patternProperties"] = supported
        if len(supported) < len(patterns):
            out["additionalProperties"] = True  # the names that match are not known
            tell("patternProperties")


def _negation(out: Schema, negated: object, document: Document, tell: Tell) -> None:
    """Remove negated values from the values, types or properties that the schema lists."""
    match negated:
        case False:
            return
        case dict() | True if negated in ({}, True):
            out["enum"] = []
            return
        case {"type": str() | list() as kinds, **more} if not more:
            _without_types(out, [kinds] if isinstance(kinds, str) else kinds, document)
            return
        case {"required": [str(name)], **more} if not more.keys() - {"type"}:
            properties = out.get("properties")
            if isinstance(properties, dict | None) and out.get("type") == "object":
                if properties is None:
                    out.setdefault("additionalProperties", True)
                out["properties"] = (properties or {}) | {name: False}
                return
        case {"const": value, **more} if not more.keys() - {"type"} and _lists(out):
            _without_values(out, [value], document)
            return
        case {"enum": list(values), **more} if not more.keys() - {"type"} and _lists(out):
            _without_values(out, values, document)
            return
    tell("not")


def _lists(out: Schema) -> bool:
    return isinstance(out.get("enum"), list)


def _without_values(out: Schema, barred: list[object], document: Document) -> None:
    listed = out["enum"]
    keys = document.values.each(listed)
    barred_keys = frozenset(document.values.each(barred))
    out["enum"] = [item for item, key in zip(listed, keys, strict=True) if key not in barred_keys]


def _without_types(out: Schema, kinds: list[object], document: Document) -> None:
    given = out.get("type", [kind for kind in TYPES if kind != "integer"])
    listed = given if isinstance(given, list) else [given]
    document.operations.count(len(kinds) + len(listed))
    barred = {kind for kind in kinds if isinstance(kind, str)}
    barred |= {"integer"} if "number" in barred else set()
    out["type"] = [kind for kind in listed if not isinstance(kind, str) or kind not in barred]


def _property_names(out: Schema, names: object, document: Document, tell: Tell) -> None:
    """Express a constraint on property names by listed names or a pattern."""
    if names is True or not isinstance(names, Mapping):
        return
    bounds = names.keys() - {"type", "title", "description"}
    rest = out.get("additionalProperties", True)
    if "properties" in out or "patternProperties" in out or _IN_PLACE & out.keys():
        if bounds:
            tell("propertyNames")
    elif bounds in ({"enum"}, {"const"}):
        listed = names.get("enum", [names.get("const")])
        texts = listed if isinstance(listed, list) else []
        document.operations.count(len(texts))
        out["properties"] = {name: rest for name in texts if isinstance(name, str)}
        out["additionalProperties"] = False
    elif bounds == {"pattern"} and (pattern := rust_pattern(str(names["pattern"]))) is not None:
        out["patternProperties"] = {pattern: rest}
        out["additionalProperties"] = False
    elif bounds and bounds <= {"minLength", "maxLength"}:
        max_length = names.get("maxLength", "")
        out["patternProperties"] = {f"^(?s:.{{{names.get('minLength', 0)},{max_length}}})$": rest}
        out["additionalProperties"] = False
    elif bounds:
        tell("propertyNames")


def _unique_items(out: Schema, items: object, tell: Tell) -> None:
    if isinstance(items, Mapping):
        values = items.get("enum", [items["const"]] if "const" in items else None)
        num_distinct = 2 if items.get("type") == "boolean" else None
        num_distinct = len(values) if isinstance(values, list) else num_distinct
        if num_distinct is not None:
            bound = out.get("maxItems", num_distinct)
            out["maxItems"] = min(bound, num_distinct) if isinstance(bound, int) else bound
    if out.get("maxItems") not in (0, 1):
        tell("uniqueItems")


def _unevaluated_items(out: Schema, rest: object, tell: Tell) -> None:
    if rest is True or isinstance(out.get("items"), bool | dict):
        return
    if _IN_PLACE & out.keys():
        tell("unevaluatedItems")
    else:
        out["items"] = rest


def remove_counts(out: Schema) -> tuple[str, ...]:
    """Remove bounds of an object's size that no grammar supports, and return these keywords.

    :param out: an object, already closed if it will be.
    """
    properties, required = out.get("properties"), out.get("required", [])
    bounds = tuple(key for key in ("minProperties", "maxProperties") if key in out)
    if not bounds or not isinstance(properties, dict) or not isinstance(required, list):
        return ()
    needed = {name for name in required if isinstance(name, str)}
    optional = [
        name for name, part in properties.items() if name not in needed and part is not False
    ]
    is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
    numbers = [out[key] for key in bounds]
    if not optional or not all(isinstance(number, int) for number in numbers):
        return ()
    least = out.get("minProperties", 0) - len(required)
    most = out.get("maxProperties", len(required) + len(optional)) - len(required)
    if is_closed and most >= len(optional):
        out.pop("maxProperties", None)
    if least <= 0:
        out.pop("minProperties", None)
    left = tuple(key for key in bounds if key in out)
    if is_closed and least <= 1 and ("maxProperties" not in out or most == 1):
        return ()  # the grammar supports exactly one, or at least one
    for key in left:
        del out[key]
    return left
