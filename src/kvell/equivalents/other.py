"""Fields and arguments of other systems that Kvell does not have, and what it does with each."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from types import MappingProxyType
from typing import TypeVar

from kvell.equivalents.entry import nearest
from kvell.errors import ChangeSomething, UnknownArgument

logger = logging.getLogger(__name__)

Record = TypeVar("Record")

NEAR = 0.75
"""The similarity of two names, of 1, from which a name is proposed in place of another."""
SHOWN_CHARS = 80


@dataclass(frozen=True)
class Other:
    """A field that is not supported.

    :param why: reason why the field has no effect; if given, every value is accepted.
    :param remedy: alternative to a value that is refused.
    :param values: accepted values besides null; they request the default behaviour.
    """

    why: str = ""
    remedy: str = "leave it out"
    values: tuple[object, ...] = ()

    def is_taken(self, value: object) -> bool:
        if self.why or value is None:
            return True
        return any(value == taken and type(value) is type(taken) for taken in self.values)


def check_others(
    owner: str,
    given: Mapping[str, object],
    names: Collection[str],
    others: Mapping[str, Other],
    place: str = "",
) -> None:
    """Check the arguments of a call that its owner does not have.

    :raises ChangeSomething: naming an argument whose value cannot be honoured.
    :raises UnknownArgument: naming an argument that neither has.
    """
    for name, value in given.items():
        other = others.get(name)
        if other is None:
            raise unknown_argument(owner, place + name, value, {place + each for each in names})
        if not other.is_taken(value):
            problem = f"{owner} does not support it"
            raise ChangeSomething(place + name, show(value), problem, other.remedy)
        if other.why and value is not None:
            logger.info("%s: %s has no effect: %s", owner, name, other.why)


def refuses_unknown(
    others: Mapping[str, Other], renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[Record]], type[Record]]:
    """Return a decorator of a dataclass that refuses unknown arguments by name."""

    def decorate(record: type[Record]) -> type[Record]:
        make: Callable[..., None] = record.__init__
        names = frozenset(field.name for field in fields(record))  # type: ignore[arg-type]

        @wraps(make)
        def __init__(self: Record, *args: object, **given: object) -> None:  # noqa: N807
            if given.keys() <= names:
                make(self, *args, **given)
                return
            own = {renamed.get(name, name): value for name, value in given.items()}
            unknown = {name: own.pop(name) for name in own.keys() - names}
            check_others(record.__name__, unknown, names, others)
            make(self, *args, **own)

        record.__init__ = __init__  # type: ignore[method-assign,assignment]
        return record

    return decorate


def unknown_argument(
    owner: str, name: str, value: object, names: Collection[str]
) -> UnknownArgument:
    near = nearest(name, names, NEAR)
    remedy = f"did you mean {near[0]}?" if near else "leave it out"
    return UnknownArgument(name, show(value), f"is not an argument of {owner}", remedy)


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
