"""Messages of managers: an instance obeys the manager with the highest epoch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lead:
    """The command by which a manager takes the instance; :class:`Led` answers it.

    :param epoch: the manager's; commands with a lower epoch are refused from now on.
    """

    epoch: int


@dataclass(frozen=True)
class Led:
    """The answer to a manager's command.

    :param epoch: the command's epoch if it is obeyed; else the higher epoch of another manager.
    """

    epoch: int


@dataclass(frozen=True)
class Drained:
    """The last event of an instance: all requests have ended."""


@dataclass(frozen=True)
class Introduce:
    """The addresses of all instances that serve now; they replace earlier addresses.

    :param addresses: ``tcp://host:port`` by the instance's name.
    :param epoch: epoch of the manager that sends it; 0 without a manager.
    """

    addresses: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
