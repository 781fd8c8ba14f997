"""A check whether at most one of several schemas can fit: then oneOf and anyOf are the same."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kvell.engine.protocol.schemas.references import Schema

Resolve = Callable[[object], object]


def are_apart(branches: Sequence[object], resolve: Resolve) -> bool:
    """Return whether types and constants prove that no value fits two of the schemas.

    :param resolve: follows the references of a schema.
    """
    by_type: defaultdict[str, list[Schema]] = defaultdict(list)
    for branch in map(resolve, branches):
        if not isinstance(branch, dict):
            return False
        kinds = branch.get("type", "any")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            by_type["number" if kind == "integer" else str(kind)].append(branch)
    groups = [group for group in by_type.values() if len(group) > 1]
    if "any" in by_type and len(by_type) > 1:
        return False
    return all(_by_values(group) or _by_property(group, resolve) for group in groups)


def _by_values(group: Sequence[object]) -> bool:
    """Return whether all schemas list their values, and no value is in two lists."""
    lists = [_values(schema) for schema in group]
    sets = [values for values in lists if values is not None]
    return len(sets) == len(lists) and sum(map(len, sets)) == len(set[str]().union(*sets))


def _by_property(group: Sequence[Schema], resolve: Resolve) -> bool:
    """Return whether all schemas require a property whose values differ in each."""
    needed = [_needed(schema) for schema in group]
    return any(
        all(name in parts for parts in needed)
        and _by_values([resolve(parts[name]) for parts in needed])
        for name in needed[0]
    )


def _needed(schema: Schema) -> Mapping[str, object]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: properties[name] for name in map(str, required) if name in properties}


def _values(schema: object) -> set[str] | None:
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    return {json.dumps(value, sort_keys=True) for value in values}
