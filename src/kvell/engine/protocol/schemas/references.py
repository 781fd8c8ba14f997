"""Resolution of references in a schema, and of schemas that move below another schema."""

from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = dict[str, Any]
"""A JSON schema that is an object."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are data, even if they look like schemas."""


class Document:
    """A schema with its definitions.

    :param root: as parsed from JSON.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._named: dict[str, object] | None = None

    def target(self, reference: object) -> object:
        """Return the target of a reference.

        :raises ValueError: if it is not in the document.
        """
        if isinstance(reference, str):
            for name, start in self._starts(reference):
                part = _below(start, name)
                if part is not None:
                    return part
        raise ValueError(f"$ref {str(reference)[:100]!r} has no target in the schema")

    def _starts(self, reference: str) -> Iterator[tuple[str, object]]:
        """Yield the paths of a reference, each with the part where it may begin."""
        base, _, fragment = reference.partition("#")
        if not base and (not fragment or fragment.startswith("/")):
            yield fragment, self._root
            return
        if self._named is None:
            self._named = dict(_names(self._root))
        if reference in self._named:
            yield "", self._named[reference]
        if base in self._named:
            yield fragment, self._named[base]


def within(schema: Schema, place: str) -> Schema:
    """Return a schema with its references adjusted to a place inside another schema.

    :param place: a reference to that place, such as ``#/$defs/f``.
    """
    moved: Schema = {}
    for key, value in schema.items():
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _moved(part, place) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            moved[key] = place + value[1:]
        else:
            moved[key] = value if key in DATA else _moved(value, place)
    return moved


def _moved(part: object, place: str) -> object:
    if isinstance(part, list):
        return [_moved(item, place) for item in part]
    return within(part, place) if isinstance(part, dict) else part


def _below(start: object, path: str) -> object | None:
    node = start
    for part in unquote(path).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, dict | bool) else None


def _names(root: object) -> Iterator[tuple[str, object]]:
    """Yield the names that parts of a document define for themselves."""
    level = [root]
    while level:
        for part in level:
            if isinstance(part, dict):
                for key, before in (("$anchor", "#"), ("$id", ""), ("id", "")):
                    if isinstance(part.get(key), str):
                        yield before + part[key].removesuffix("#"), part
        level = [inner for part in level for inner in _inside(part)]


def _inside(part: object) -> list[object]:
    if isinstance(part, dict):
        return list(part.values())
    return part if isinstance(part, list) else []
