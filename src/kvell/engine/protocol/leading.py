"""Whom an instance obeys where several managers may take it for theirs, and what they order."""

from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Introduce:
    """Where all instances listen that serve now; it replaces what was said before.

    :param addresses: ``tcp://host:port`` by the instance's name.
    :param epoch: of the manager that orders it; 0: there is none.
    """

    addresses: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
