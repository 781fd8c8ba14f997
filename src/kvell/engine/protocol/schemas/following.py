"""Rewriting of a schema for the grammar: objects are closed unless the schema opens them.

An object that names properties has no others at any depth unless the schema allows them, as in
OpenAI's strict mode.  Several parts may describe one object, such as the parts of an ``allOf``:
they are closed together, with the names of all parts::

    allOf: [{a}, {b}]          {allOf: [{a}, {b}], a: true, b: true, no others}
    {a}, anyOf: [{b}, {c}]     {a}, anyOf: [{b, a: true, no others}, {c, a: true, no others}]
    $ref: D                    D closed; or D unchanged where it is a part

Only local references are followed.  Texts for readers are left out, so that schemas which differ
only in these share a grammar.

The work for one schema is bounded by ``MOST_PARTS`` and by ``Operations``; it belongs in a
grammar process, not on an event loop.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from kvell.engine.protocol.schemas.plain import plain, remove_counts
from kvell.engine.protocol.schemas.references import Document, Operations, Schema

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


def are_apart(branches: Sequence[object], document: Document) -> bool:
    """Return whether types and constants prove that no value fits two of the schemas."""
    by_type: defaultdict[str, list[Schema]] = defaultdict(list)
    for branch in map(document.resolve, branches):
        if not isinstance(branch, dict):
            return False
        kinds = branch.get("type", "any")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        document.operations.count(len(kinds))
        for kind in kinds:
            if not isinstance(kind, str):
                return False
            by_type["number" if kind == "integer" else kind].append(branch)
    groups = [group for group in by_type.values() if len(group) > 1]
    if "any" in by_type and len(by_type) > 1:
        return False
    return all(_by_values(group, document) or _by_property(group, document) for group in groups)


def _by_values(group: Sequence[object], document: Document) -> bool:
    seen_keys: set[Hashable] = set()
    for schema in group:
        keys = _value_keys(schema, document)
        if keys is None or not seen_keys.isdisjoint(keys):
            return False
        seen_keys.update(keys)
    return True


def _by_property(group: Sequence[Schema], document: Document) -> bool:
    needed = [_needed(schema, document) for schema in group]
    for name in needed[0]:
        document.operations.count(len(needed))
        if all(name in parts for parts in needed) and _by_values(
            [document.resolve(parts[name]) for parts in needed], document
        ):
            return True
    return False


def _needed(schema: Schema, document: Document) -> Mapping[str, object]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    document.operations.count(len(required))
    return {name: properties[name] for name in map(str, required) if name in properties}


def _value_keys(schema: object, document: Document) -> Sequence[Hashable] | None:
    """Return the keys of a schema's values or of its constant; None if it has neither."""
    if not isinstance(schema, Mapping):
        return None
    if "enum" in schema:
        values = schema["enum"]
        return document.values.each(values) if isinstance(values, list) else None
    return [document.values.key(schema["const"])] if "const" in schema else None


MOST_PARTS = 50_000
"""The most schemas inside a rewritten one; llguidance accepts no more."""
MOST_PATH_CHARS = 200
"""The most characters of a path: names of properties have any length."""
_VALUES = tuple(
    (
        "type const enum required minProperties maxProperties minItems maxItems minLength "
        "maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
    ).split()
)
_MAPS = ("properties", "patternProperties")
_INNER = ("additionalProperties", "items", "additionalItems", "prefixItems")
_OTHERS = frozenset((*_MAPS, *_INNER, *IN_PLACE, "unevaluatedProperties"))
"""Keywords with schemas."""
_FOLLOWED = frozenset(_VALUES) | _OTHERS


@dataclass(frozen=True)
class UnenforcedKeyword:
    """A keyword that the grammar does not enforce.

    :param path: place in the schema, such as ``properties.name.format``; at most
        ``MOST_PATH_CHARS`` characters of it.
    """

    path: str
    keyword: str


@dataclass(frozen=True)
class EnforceableSchema:
    """A schema for the grammar, and the keywords of the original that are not enforced."""

    schema: object
    unfollowed: tuple[UnenforcedKeyword, ...]


def make_enforceable(schema: object, operations: Operations | None = None) -> EnforceableSchema:
    """Rewrite a schema for the grammar.

    :param schema: as parsed from JSON; a value that is no schema stays as it is.
    :param operations: the counter of the work; None counts up to ``MOST_OPERATIONS``.
    :raises ValueError: if a reference has no target, or the schema is too large or too deep.
    """
    rewriting = _Rewriting(schema, Document(schema, operations))
    try:
        return EnforceableSchema(rewriting.rewritten(), tuple(dict.fromkeys(rewriting.unfollowed)))
    except RecursionError:
        raise ValueError("the schema is too complex: it is nested too deeply") from None


@dataclass(frozen=True)
class _Rest:
    """The rewritten schema of an object's other properties.

    :param parts: the number of schemas inside.
    """

    schema: object
    parts: int = 0


class _Rewriting:
    """The rewriting of one schema, which collects ``unfollowed``."""

    def __init__(self, root: object, document: Document) -> None:
        self.unfollowed: list[UnenforcedKeyword] = []
        self._root, self._document = root, document
        self._parts = Parts(document)
        self._names: dict[tuple[int, bool], str] = {}
        self._awaited: list[tuple[str, object, str, bool]] = []
        self._written = 0

    def rewritten(self) -> object:
        root = self._root
        written = self._value(root, "", closes=True)
        definitions: Schema = {}
        while self._awaited:  # no recursion: there may be many definitions
            name, target, path, closes = self._awaited.pop()
            definitions[name] = self._value(target, path, closes=closes)
        if isinstance(written, dict) and isinstance(root, dict):
            if "x-guidance" in root:
                written["x-guidance"] = root["x-guidance"]
            if definitions:
                written["$defs"] = definitions
        return written

    def _value(self, schema: object, path: str, *, closes: bool) -> object:
        """Return the rewritten schema of one value.

        :param closes: False if surrounding schemas describe the same value.
        """
        if isinstance(schema, dict):
            return self._rewritten(schema, path, closes=closes)
        return schema

    def _rewritten(self, schema: Schema, path: str, *, closes: bool) -> Schema:
        self._count(1)
        source, keywords = self._parts.plain(schema)
        self._note(path, keywords)
        kept = {key: value for key, value in source.items() if key in _FOLLOWED}
        if _OTHERS.isdisjoint(kept):
            return kept
        match kept:
            case {"$ref": reference, **more} if not more:
                return self._reference(reference, path, closes=closes)
            case {"allOf": [dict(part)], **more} if not more:
                return self._rewritten(part, _below(path, "allOf[0]."), closes=closes)
        return self._assertions(schema, source, path, closes=closes)

    def _assertions(self, schema: Schema, source: Schema, path: str, *, closes: bool) -> Schema:
        outer = self._parts.certain(schema)
        choices = self._parts.choices(source)
        given = source.get("unevaluatedProperties", False) if closes else True
        is_open = outer.is_settled or given is True
        rest = _Rest(True)
        if not is_open:
            rest = self._rest(given, path)
            named = ObjectFacts(is_named="unevaluatedProperties" in source)
            outer = self._parts.together((outer, named))
        chosen = choices[0] if len(choices) == 1 and not is_open else None
        out: Schema = {}
        for key, value in source.items():
            here = _below(path, key)
            if key in _VALUES:
                out[key] = value
            elif key in _MAPS and isinstance(value, dict):
                out[key] = {
                    name: self._value(
                        part, _below(here, f".{name[:MOST_PATH_CHARS]}."), closes=True
                    )
                    for name, part in value.items()
                }
            elif key in _INNER:
                out[key] = self._each(value, here, closes=True)
            elif key == "$ref":
                out |= self._reference(value, path, closes=False)
            elif key == chosen:
                branches = enumerate(value)
                out[key] = [
                    self._branch(branch, _below(here, f"[{i}]."), outer, rest)
                    for i, branch in branches
                ]
            elif key in IN_PLACE:
                out[key] = self._each(value, here, closes=False)
            if key == "oneOf" and not self._is_any_of(source):
                self._note(path, (key,))
        if not is_open and chosen is None:
            self._close(out, self._parts.together((outer, self._parts.chosen(source))), rest)
        self._note(path, remove_counts(out))
        return out

    def _rest(self, given: object, path: str) -> _Rest:
        before = self._written
        schema = self._value(given, _below(path, "unevaluatedProperties."), closes=True)
        return _Rest(schema, self._written - before)

    def _each(self, value: object, path: str, *, closes: bool) -> object:
        if not isinstance(value, list):
            return self._value(value, _below(path, "."), closes=closes)
        parts = enumerate(value)
        return [self._value(part, _below(path, f"[{i}]."), closes=closes) for i, part in parts]

    def _branch(self, branch: object, path: str, outer: ObjectFacts, rest: _Rest) -> object:
        """Return a branch of a choice, rewritten together with the facts ``outer`` around it."""
        if outer == NO_FACTS or not isinstance(branch, dict):
            return self._value(branch, path, closes=True)
        facts = self._parts.possible(branch)
        if facts.is_settled:
            return self._value(branch, path, closes=False)
        written = self._rewritten(branch, path, closes=False)
        if any(key in written for key in IN_PLACE):
            written = {"allOf": [written]}
        self._close(written, self._parts.together((outer, facts)), rest)
        return written

    def _reference(self, reference: object, path: str, *, closes: bool) -> Schema:
        """Return a reference to a rewritten target."""
        target = self._document.target(reference)
        key = id(target), closes
        if key not in self._names:
            self._names[key] = name = str(len(self._names))
            base, _, pointer = str(reference).partition("#")
            if base or not (pointer == "" or pointer.startswith("/")):
                place = _below(path, "$ref.")  # the target has a name of its own
            else:
                place = _below(pointer[1:].replace("/", "."), "." if pointer[1:] else "")
            self._awaited.append((name, target, place, closes))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _is_any_of(self, source: Schema) -> bool:
        branches = source["oneOf"]
        if not isinstance(branches, list) or isinstance(source.get("discriminator"), dict):
            return True
        return are_apart(branches, self._document)

    def _close(self, out: Schema, facts: ObjectFacts, rest: _Rest) -> None:
        if facts.is_settled or not facts.is_named:
            return
        self._count(len(facts.names) + len(facts.patterns) + rest.parts)
        for key, names in (("properties", facts.names), ("patternProperties", facts.patterns)):
            if names:
                given = out.get(key, {})
                out[key] = given | {name: True for name in names if name not in given}
        out["additionalProperties"] = rest.schema

    def _note(self, path: str, keywords: Sequence[str]) -> None:
        self.unfollowed += [UnenforcedKeyword(_below(path, key), key) for key in keywords]

    def _count(self, parts: int) -> None:
        self._written += parts
        if self._written > MOST_PARTS:
            raise ValueError(f"the schema is too complex: it has more than {MOST_PARTS} parts")


def _below(path: str, part: str) -> str:
    """Return the path of a part; long paths are cut, so that many parts below one stay small."""
    return (path + part)[:MOST_PATH_CHARS]
