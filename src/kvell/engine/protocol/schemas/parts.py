"""The parts of a schema, and what several of them say together of one object's properties."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from kvell.engine.protocol.schemas.plain import plain
from kvell.engine.protocol.schemas.references import Document, Schema

CHOICES = ("anyOf", "oneOf")
IN_PLACE = ("$ref", "allOf", *CHOICES)
"""Keywords whose schemas are of the same value as the schema around them."""
CONDITIONS = ("if", "then", "else")
MOST_REFERENCES = 64
"""That lead to one another."""


@dataclass(frozen=True)
class ObjectFacts:
    """What is known of an object's properties.

    :param names: of properties.
    :param patterns: of names.
    :param is_named: whether properties are named, so that there are no others.
    :param is_settled: whether it is said what others there may be.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    is_named: bool = False
    is_settled: bool = False

    def __add__(self, other: "ObjectFacts") -> "ObjectFacts":
        return ObjectFacts(
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            self.is_named or other.is_named,
            self.is_settled or other.is_settled,
        )


class Parts:
    """What is found out about a document's schemas, each once."""

    def __init__(self, root: object) -> None:
        self._document = Document(root)
        self._plain: dict[int, tuple[Schema, tuple[str, ...]]] = {}
        self._made: list[Schema] = []
        self._certain: dict[int, ObjectFacts] = {}

    def target(self, reference: object) -> object:
        """What a reference means.

        :raises ValueError: if it leads nowhere.
        """
        return self._document.target(reference)

    def resolved(self, schema: object) -> object:
        """What a schema is behind its references."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self.target(schema["$ref"])
        return schema

    def plain(self, schema: Schema) -> tuple[Schema, tuple[str, ...]]:
        """A schema without keywords that no grammar knows, and those that are not followed."""
        key = id(schema)
        if key not in self._plain:
            keywords: list[str] = []
            made = plain(schema, self.resolved, keywords.append)
            self._made.append(schema)  # as long as it lives, no other has its id
            self._plain[key] = made, tuple(dict.fromkeys(keywords))
        return self._plain[key]

    def choices(self, source: Schema) -> list[str]:
        """Keywords by which a schema chooses among others."""
        return [key for key in CHOICES if isinstance(source.get(key), list)]

    def certain(self, schema: Schema) -> ObjectFacts:
        """What a schema says of all objects that fit it."""
        key = id(schema)
        if key not in self._certain:
            self._certain[key] = ObjectFacts()  # of those that lead to themselves
            source = self.plain(schema)[0]
            found = _said(schema, source)
            if "$ref" in source:
                found += self.possible(self.target(source["$ref"]))
            self._certain[key] = found + self._sum(source.get("allOf"))
        return self._certain[key]

    def possible(self, schema: object) -> ObjectFacts:
        """What a schema says of some objects that fit it."""
        if not isinstance(schema, dict):
            return ObjectFacts()
        return self.certain(schema) + self.chosen(self.plain(schema)[0])

    def chosen(self, source: Schema) -> ObjectFacts:
        """What those say among which a schema chooses."""
        return sum((self._sum(source[key]) for key in self.choices(source)), ObjectFacts())

    def _sum(self, schemas: object) -> ObjectFacts:
        return sum(map(self.possible, schemas if isinstance(schemas, list) else []), ObjectFacts())


def _said(schema: Schema, source: Schema) -> ObjectFacts:
    properties, patterns = source.get("properties"), source.get("patternProperties")
    conditions = chain([schema.get(key) for key in CONDITIONS], _values(schema, "dependentSchemas"))
    named = chain(_keys(properties), _strings(source.get("required")))
    conditional = chain.from_iterable(_names_of(one) for one in conditions)
    rest = source.get("unevaluatedProperties", False)
    return ObjectFacts(
        tuple(dict.fromkeys(chain(named, conditional))),
        tuple(_keys(patterns)),
        isinstance(properties, dict) or isinstance(patterns, dict),
        "additionalProperties" in source or rest is True,
    )


def _names_of(schema: object) -> Iterable[str]:
    if not isinstance(schema, dict):
        return ()
    return chain(_keys(schema.get("properties")), _strings(schema.get("required")))


def _values(schema: Schema, key: str) -> list[object]:
    return list(schema[key].values()) if isinstance(schema.get(key), dict) else []


def _keys(value: object) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _strings(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
