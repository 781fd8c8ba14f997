"""A check whether at most one of several schemas can fit: then oneOf and anyOf are the same."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from kvell.engine.protocol.schemas.references import Document, Schema


def are_apart(branches: Sequence[object], document: Document) -> bool:
    """Return whether types and constants prove that no value fits two of the schemas.

    :param document: the document of the schemas.
    """
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
