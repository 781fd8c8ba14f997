"""The parts of a schema that describe one object, and its properties by all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from kvell.engine.protocol.schemas.plain import plain
from kvell.engine.protocol.schemas.references import Document, Schema

CHOICES = ("anyOf", "oneOf")
IN_PLACE = ("$ref", "allOf", *CHOICES)
"""Keywords whose schemas describe the same value as the schema around them."""
CONDITIONS = ("if", "then", "else")


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


NO_FACTS = ObjectFacts()


class Parts:
    """A cache of facts about a document's schemas."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._plain: dict[int, tuple[Schema, tuple[str, ...]]] = {}
        self._made: list[Schema] = []
        self._certain: dict[int, ObjectFacts] = {}
        self._chosen: dict[int, ObjectFacts] = {}
        self._possible: dict[int, ObjectFacts] = {}

    def plain(self, schema: Schema) -> tuple[Schema, tuple[str, ...]]:
        """Return a schema without unsupported keywords, and the keywords that are not enforced."""
        key = id(schema)
        if key not in self._plain:
            keywords: list[str] = []
            made = plain(schema, self._document, keywords.append)
            self._made.append(schema)  # kept alive, so that no other schema has its id
            self._plain[key] = made, tuple(dict.fromkeys(keywords))
        return self._plain[key]

    def choices(self, source: Schema) -> list[str]:
        return [key for key in CHOICES if isinstance(source.get(key), list)]

    def certain(self, schema: Schema) -> ObjectFacts:
        """Return the facts of a schema and its ``allOf``, without its choices."""
        key = id(schema)
        if key not in self._certain:
            self._certain[key] = NO_FACTS  # of schemas that refer to themselves
            source = self.plain(schema)[0]
            facts = [_said(schema, source)]
            if "$ref" in source:
                facts.append(self.possible(self._document.target(source["$ref"])))
            facts.append(self._possible_together(source.get("allOf")))
            self._certain[key] = self.together(facts)
        return self._certain[key]

    def possible(self, schema: object) -> ObjectFacts:
        """Return the facts of a schema and its choices: they hold for some objects that fit."""
        self._document.operations.count(1)
        if not isinstance(schema, dict):
            return NO_FACTS
        key = id(schema)
        if key not in self._possible:
            facts = self.certain(schema), self.chosen(self.plain(schema)[0])
            self._possible[key] = self.together(facts)
        return self._possible[key]

    def chosen(self, source: Schema) -> ObjectFacts:
        """Return the facts of the choices of a schema.

        :param source: a schema that :meth:`plain` has returned.
        """
        key = id(source)
        if key not in self._chosen:
            facts = [self._possible_together(source[key]) for key in self.choices(source)]
            self._chosen[key] = self.together(facts)
        return self._chosen[key]

    def together(self, facts: Iterable[ObjectFacts]) -> ObjectFacts:
        """Return the facts of several schemas that describe one object.

        Names that only one of them has are shared, not copied.
        """
        # By id: many schemas refer to the same one, whose facts are one object.
        given = list({id(each): each for each in facts if each != NO_FACTS}.values())
        if len(given) <= 1:
            return given[0] if given else NO_FACTS
        return ObjectFacts(
            self._united([each.names for each in given]),
            self._united([each.patterns for each in given]),
            any(each.is_named for each in given),
            any(each.is_settled for each in given),
        )

    def _possible_together(self, schemas: object) -> ObjectFacts:
        return self.together(map(self.possible, schemas if isinstance(schemas, list) else []))

    def _united(self, lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        given = list({id(names): names for names in lists if names}.values())
        if len(given) <= 1:
            return given[0] if given else ()
        self._document.operations.count(sum(map(len, given)))
        return tuple(dict.fromkeys(chain.from_iterable(given)))


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
