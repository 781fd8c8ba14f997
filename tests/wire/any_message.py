"""Messages whose fields have any values of their types: what passes the decoders of a receiver."""

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

NAMES = ("", "a", "b", "c", "front:1", "front", "é", "x" * 300)
WHOLE = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**62, 2**63 - 1)


def packed(ids: list[int]) -> bytes:
    """Numbers as little-endian int32."""
    return b"".join(one.to_bytes(4, "little", signed=True) for one in ids)


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.sampled_from(WHOLE) | st.integers(0, 40),
    bool: st.booleans(),
    float: st.sampled_from((float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 0.5, 1e308)),
    str: st.sampled_from(NAMES),
    bytes: st.binary(max_size=9)
    | st.lists(st.integers(-3, 40), max_size=40).map(packed)
    | st.just(b"\xff" * 12),
    type(None): st.none(),
    msgspec.Raw: st.just(msgspec.Raw(b"\x01")),
}


def any_of(kind: Any, known: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Values of a type.

    :param known: what a type's values are drawn from, in place of any.
    """
    if kind in known:
        return known[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([any_of(one, known) for one in inner])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(any_of(inner[0], known), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(any_of(one, known) for one in inner))
    if origin is list:
        return st.lists(any_of(inner[0], known), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(*(any_of(one, known) for one in inner), max_size=3)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if isinstance(kind, typing.NewType):
        return any_of(kind.__supertype__, known)
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        return st.deferred(lambda: _made(kind, known))
    raise TypeError(f"no values of {kind}")


def _made(kind: type, known: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Records, also those that check themselves: what they refuse is not sent."""
    hints = typing.get_type_hints(kind)
    names = kind.__struct_fields__ if hasattr(kind, "__struct_fields__") else _fields(kind)
    fields = st.fixed_dictionaries(
        {}, optional={name: any_of(hints[name], known) for name in names}
    )
    needed = {name: any_of(hints[name], known) for name in names if _is_needed(kind, name)}
    return (
        st.tuples(fields, st.fixed_dictionaries(needed))
        .map(lambda drawn: _or_none(kind, drawn[1] | drawn[0]))
        .filter(lambda made: made is not None)
    )


def _fields(kind: Any) -> list[str]:
    return [one.name for one in dataclasses.fields(kind) if one.init]


def _is_needed(kind: Any, name: str) -> bool:
    if hasattr(kind, "__struct_fields__"):
        return any(one.name == name and one.required for one in msgspec.structs.fields(kind))
    missing = dataclasses.MISSING
    [field] = [one for one in dataclasses.fields(kind) if one.name == name]
    return field.default is missing and field.default_factory is missing


def _or_none(kind: type, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except Exception:
        return None
