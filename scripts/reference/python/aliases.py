"""Public names of types and of constants that are neither class nor function."""

from functools import cache
from types import UnionType
from typing import Any, NewType, get_origin

from scripts.reference.python.docstrings import found
from scripts.reference.python.public import PUBLIC


def is_alias(value: Any) -> bool:
    """Whether an object is a type with a name of its own, like ``Literal["a", "b"]``."""
    if isinstance(value, NewType | UnionType):
        return True
    return get_origin(value) is not None and not isinstance(value, type)


@cache
def alias_names() -> dict[tuple[str, int], str]:
    """Return the public name of each alias, by its short name and identity.

    Equal types may have several names; an annotation names the one it was written with.
    """
    named = {name: found(name) for name in PUBLIC}
    return {
        (name.rpartition(".")[2], id(value)): name
        for name, value in named.items()
        if is_alias(value)
    }
