"""Where instances of several hosts listen for each other."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Introduce:
    """Where all instances listen that serve now; it replaces what was said before.

    :param addresses: ``tcp://host:port`` by the instance's name.
    :param epoch: of the manager that orders it; 0: there is none.
    """

    addresses: dict[str, str] = dataclasses.field(default_factory=dict)
    epoch: int = 0
