"""The parts of a schema that describe one object, and its properties by all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from kvell.engine.protocol.schemas.plain import plain
from kvell.engine.protocol.schemas.references import Document, Schema

CHOICES = ("anyOf", "oneOf")
IN_PLACE = ("$ref", "allOf", *CHOICES)
"""Keywords whose schemas describe the same value as the schema around them."""
CONDITIONS = ("if", "then", "else")
MOST_REFERENCES = 64
"""The most references that are followed in a chain."""


@dataclass(frozen=True)
class ObjectFacts:
    """The properties of an object, as described by schemas.

    :param patterns: patterns of names.
    :param is_named: whether a schema names properties, so that there are no others.
    :param is_settled: whether a schema defines which other properties there may be.
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
    """A cache of facts about a document's schemas."""

    def __init__(self, root: object) -> None:
        self._document = Document(root)
        self._plain: dict[int, tuple[Schema, tuple[str, ...]]] = {}
        self._made: list[Schema] = []
        self._certain: dict[int, ObjectFacts] = {}

    def target(self, reference: object) -> object:
        """Return the target of a reference.

        :raises ValueError: if it is not in the document.
        """
        return self._document.target(reference)

    def resolve(self, schema: object) -> object:
        """Return a schema after following its references."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self.target(schema["$ref"])
        return schema

    def plain(self, schema: Schema) -> tuple[Schema, tuple[str, ...]]:
        """Return a schema without unsupported keywords, and the keywords that are not enforced."""
        key = id(schema)
        if key not in self._plain:
            keywords: list[str] = []
            made = plain(schema, self.resolve, keywords.append)
            self._made.append(schema)  # kept alive, so that no other schema has its id
            self._plain[key] = made, tuple(dict.fromkeys(keywords))
        return self._plain[key]

    def choices(self, source: Schema) -> list[str]:
        """Return the keywords of a schema that are choices between schemas."""
        return [key for key in CHOICES if isinstance(source.get(key), list)]

    def certain(self, schema: Schema) -> ObjectFacts:
        """Return the facts of a schema and its ``allOf``, without its choices."""
        key = id(schema)
        if key not in self._certain:
            self._certain[key] = ObjectFacts()  # of schemas that refer to themselves
            source = self.plain(schema)[0]
            facts = _said(schema, source)
            if "$ref" in source:
                facts += self.possible(self.target(source["$ref"]))
            self._certain[key] = facts + self._sum(source.get("allOf"))
        return self._certain[key]

    def possible(self, schema: object) -> ObjectFacts:
        """Return the facts of a schema and its choices: they hold for some objects that fit."""
        if not isinstance(schema, dict):
            return ObjectFacts()
        return self.certain(schema) + self.chosen(self.plain(schema)[0])

    def chosen(self, source: Schema) -> ObjectFacts:
        """Return the facts of the choices of a schema."""
        return sum((self._sum(source[key]) for key in self.choices(source)), ObjectFacts())

    def _sum(self, schemas: object) -> ObjectFacts:
        return sum(map(self.possible, schemas if isinstance(schemas, list) else []), ObjectFacts())


def _said(schema: Schema, source: Schema) -> ObjectFacts:
    properties, patterns = source.get("properties"), source.get("patternProperties")
    conditions = chain([schema.get(key) for key in CONDITIONS], _values(schema, "dependentSchemas"))
    named = chain(_keys(properties), _strings(source.get("required")))
    conditional = chain.from_iterable(_names_of(condition) for condition in conditions)
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
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
