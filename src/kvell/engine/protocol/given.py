"""What users give for a field, as the field's type: a text is no list of its letters."""

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from kvell.errors import ChangeSomething

SHOWN_CHARS = 80


def whole(field: str, value: Any) -> int:
    """A whole number.

    :raises ChangeSomething: if it is none: true, a text, 1.5.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(field, value, "is no whole number", "give one like 8")
    return int(value)


def number(field: str, value: Any) -> float:
    """A number.

    :raises ChangeSomething: if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(field, value, "is no number", "give one like 0.5")
    return float(value)


def flag(field: str, value: Any) -> bool:
    """True or false.

    :raises ChangeSomething: if it is neither.
    """
    if not isinstance(value, bool):
        raise _wrong(field, value, "is neither true nor false", "give True or False")
    return value


def texts(field: str, value: Any) -> tuple[str, ...]:
    """Texts; a single one stands for a list of it.

    :raises ChangeSomething: if there is something else.
    """
    if value is None:
        return ()
    many = (value,) if isinstance(value, str) else value
    if not isinstance(many, list | tuple) or not all(isinstance(one, str) for one in many):
        raise _wrong(field, value, "is no text or list of texts", 'give one like ["."]')
    return tuple(many)


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    """Token ids, of a list, a tuple, a set or an array.

    :raises ChangeSomething: if there is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(field, value, "is no list of token ids", "give one like [2, 7]")
    return tuple(whole(field, one) for one in value)


def biases(field: str, value: Any) -> dict[int, float]:
    """Numbers by token id, which JSON writes as a text.

    :raises ChangeSomething: if there is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "is no mapping from token ids to numbers", "give {504: 1.5}")
    found: dict[int, float] = {}
    for token, bias in value.items():
        is_written = isinstance(token, str) and token.isascii() and token.isdigit()
        found[whole(field, int(token) if is_written else token)] = number(field, bias)
    return found


def _wrong(field: str, value: object, problem: str, remedy: str) -> ChangeSomething:
    shown = repr(value)
    if len(shown) > SHOWN_CHARS:
        shown = f"{shown[:SHOWN_CHARS]}…"
    return ChangeSomething(field, shown, problem, remedy)
