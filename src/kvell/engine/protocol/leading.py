"""Whom an instance obeys, where several managers may believe that it is theirs; and its end."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lead:
    """A manager keeps the instance from now on; answered by :class:`Led`.

    :param epoch: of the manager; orders of lower ones are refused from now on.
    """

    epoch: int


@dataclass(frozen=True)
class Led:
    """What came of an order.

    :param epoch: the manager's own if it is obeyed; a higher one if another is.
    """

    epoch: int


@dataclass(frozen=True)
class Drained:
    """All work is done; the last event of an instance."""
