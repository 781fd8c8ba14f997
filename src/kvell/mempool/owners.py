"""The owners of pages that belong to no running request."""

from typing import Literal, NamedTuple

Tick = int
"""A time in milliseconds of an instance's own clock; only differences are meaningful."""
TICK_MILLISECONDS = 100
"""The least time between two ticks, except at deadlines."""

HoldKind = Literal["match", "alloc", "arrival", "departure", "loan"]
"""The reason for a hold: a matched prefix, allocated memory, an incoming or outgoing text, lent
memory."""


class Owner(NamedTuple):
    """The name of a hold.

    :param instance: the instance that asked for the hold.
    :param operation: a number that the incarnation never uses again.
    """

    kind: HoldKind
    instance: str
    incarnation: int
    operation: int
