"""Comparison of JSON values, where true is not 1 and 1 is 1.0."""

from collections.abc import Hashable, Sequence

from kvell.engine.protocol.schemas.operations import Operations


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
        """Return the key of a value."""
        self._operations.count(1)
        if isinstance(value, list):
            return (list, *map(self.key, value))
        if isinstance(value, dict):
            return frozenset((name, self.key(part)) for name, part in value.items())
        return (bool, value) if isinstance(value, bool) else value
