"""Who holds pages that belong to no running request, and for how long."""

from typing import Literal, NamedTuple

Tick = int
"""Time in milliseconds on an instance's own clock; only differences mean anything."""

HoldKind = Literal["match", "alloc", "arrival", "departure", "loan"]
"""Why pages are held: a prefix that was matched, memory that was asked for, a text that comes or
goes, memory that is lent."""


class Owner(NamedTuple):
    """Names a hold.

    :param instance: who asked for it, and its ``incarnation``.
    :param operation: never used again by that incarnation.
    """

    kind: HoldKind
    instance: str
    incarnation: int
    operation: int
