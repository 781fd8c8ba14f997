"""The open connections by phase, and the choice of the one to drop when there is no room."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, Literal, TypeVar, get_args

Phase = Literal["arriving", "idle", "body", "answer"]
"""The next event of a connection: its transport, a request's head, a request's body, its answer."""
WAITING: tuple[Phase, ...] = ("idle", "body")
"""Phases in which a connection may be dropped, in the order of dropping."""

Connection = TypeVar("Connection")


class OpenConnections(Generic[Connection]):
    """Open connections by phase, in the order in which they entered the phase.

    When there is no room, the connection that has waited longest is dropped.  So a client that
    opens connections, and sends nothing or an endless request, displaces its own connections.

    ::

        arriving ──► idle ──head──► body ──complete──► answer
                      ▲ │             │                  │
                      │ └── dropped ──┘                  │
                      └──────────── answered ────────────┘

    :param most: the largest number of open connections.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._phases: dict[Connection, Phase] = {}
        self._by_phase: Mapping[Phase, dict[Connection, None]] = MappingProxyType(
            {phase: {} for phase in get_args(Phase)}
        )

    def __len__(self) -> int:
        return len(self._phases)

    def count(self, phase: Phase) -> int:
        return len(self._by_phase[phase])

    def enter(self, connection: Connection, phase: Phase) -> None:
        """Add a connection, or move it to a phase.

        A connection that is in this phase already keeps its place in the order.
        """
        before = self._phases.get(connection)
        if before == phase:
            return
        if before is not None:
            del self._by_phase[before][connection]
        self._phases[connection] = phase
        self._by_phase[phase][connection] = None

    def on_closed(self, connection: Connection) -> None:
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._by_phase[phase][connection]

    def longest_waiting(self) -> Connection | None:
        """Return the connection to drop when there is no room; None if none may be dropped."""
        for phase in WAITING:
            for connection in self._by_phase[phase]:
                return connection
        return None
