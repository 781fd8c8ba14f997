"""Resolution of references in a schema, and of schemas that move below another schema."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

MOST_OPERATIONS = 500_000
"""The most names copied, values compared and references followed for one schema.

All of them take about 0.2 s of processor time.  A schema of the greatest accepted length needs less
than a tenth unless its references repeat large parts.
"""


class Operations:
    """A counter of operations with a limit."""

    def __init__(self, most: int = MOST_OPERATIONS) -> None:
        self._most = most
        self.done = 0

    def count(self, operations: int) -> None:
        """Count operations that follow.

        :raises ValueError: if there are too many.
        """
        self.done += operations
        if self.done > self._most:
            raise ValueError(
                f"the schema is too complex: its references take more than {self._most} operations"
            )


class ValueKeys:
    """A cache of hashable keys of a schema's values: two values are equal if their keys are."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._lists: dict[int, tuple[Sequence[object], tuple[Hashable, ...]]] = {}

    def each(self, values: Sequence[object]) -> tuple[Hashable, ...]:
        self._operations.count(len(values))
        cached = self._lists.get(id(values))
        if cached is None:  # the list is kept alive, so that no other has its id
            cached = self._lists[id(values)] = values, tuple(map(self.key, values))
        return cached[1]

    def key(self, value: object) -> Hashable:
        self._operations.count(1)
        if isinstance(value, list):
            return (list, *map(self.key, value))
        if isinstance(value, dict):
            return frozenset((name, self.key(part)) for name, part in value.items())
        return (bool, value) if isinstance(value, bool) else value


Schema: TypeAlias = dict[str, Any]
"""A JSON schema that is an object."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are data, even if they look like schemas."""
MOST_REFERENCES = 64
"""The most references that are followed in a chain."""


class Document:
    """A schema with its definitions.

    :param root: as parsed from JSON.
    """

    def __init__(self, root: object, operations: Operations | None = None) -> None:
        self._root = root
        self._named: dict[str, object] | None = None
        self._targets: dict[str, object] = {}
        self.operations = operations or Operations()
        self.values = ValueKeys(self.operations)

    def target(self, reference: object) -> object:
        """Return the target of a reference.

        :raises ValueError: if it is not in the document.
        """
        self.operations.count(1)
        if isinstance(reference, str):
            if reference in self._targets:
                return self._targets[reference]
            for name, start in self._starts(reference):
                part = _below(start, name)
                if part is not None:
                    self._targets[reference] = part
                    return part
        raise ValueError(f"$ref {str(reference)[:100]!r} has no target in the schema")

    def resolve(self, schema: object) -> object:
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self.target(schema["$ref"])
        return schema

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
    :return: the same object if no reference changes.
    """
    changed: Schema = {}
    for key, value in schema.items():
        moved: object = value
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            moved = _moved_parts(value, place)
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            moved = place + value[1:]
        elif key not in DATA:
            moved = _moved(value, place)
        if moved is not value:
            changed[key] = moved
    return schema | changed if changed else schema


def _moved(part: object, place: str) -> object:
    if isinstance(part, list):
        moved = [_moved(item, place) for item in part]
        return moved if any(a is not b for a, b in zip(part, moved, strict=True)) else part
    return within(part, place) if isinstance(part, dict) else part


def _moved_parts(parts: Schema, place: str) -> Schema:
    """Return named schemas that are moved; the same object if no reference changes."""
    moved = {name: _moved(part, place) for name, part in parts.items()}
    return moved if any(moved[name] is not part for name, part in parts.items()) else parts


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
