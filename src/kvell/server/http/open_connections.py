"""Which connections are open, and which of them goes when another wants its place."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, Literal, TypeVar, get_args

Phase = Literal["arriving", "idle", "body", "answer"]
"""What a connection waits for: the event loop, a request's head, a request's body, its answer."""
WAITING: tuple[Phase, ...] = ("idle", "body")
"""Phases in which nothing was done for the client yet, those that lose the least first."""

Connection = TypeVar("Connection")


class OpenConnections(Generic[Connection]):
    """Open connections by phase, each phase in the order in which they came to it.

    When there is no room, the connection that has waited longest goes.  So a stranger who opens
    connections, and sends nothing or an endless request, displaces his own.

    ::

        arriving ──► idle ──head──► body ──complete──► answer
                      ▲ │             │                  │
                      │ └── dropped ──┘                  │
                      └──────────── answered ────────────┘

    :param most: how many may be open.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._phases: dict[Connection, Phase] = {}
        self._by_phase: Mapping[Phase, dict[Connection, None]] = MappingProxyType(
            {phase: {} for phase in get_args(Phase)}
        )

    def __len__(self) -> int:
        """How many are open."""
        return len(self._phases)

    def count(self, phase: Phase) -> int:
        """How many are in a phase."""
        return len(self._by_phase[phase])

    def enter(self, connection: Connection, phase: Phase) -> None:
        """Note that a connection is in a phase now; a new one is opened by that.

        A connection that is in this phase already keeps its place in the order.
        """
        before = self._phases.get(connection)
        if before == phase:
            return
        if before is not None:
            del self._by_phase[before][connection]
        self._phases[connection] = phase
        self._by_phase[phase][connection] = None

    def closed(self, connection: Connection) -> None:
        """Forget a connection; one that is not known is ignored."""
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._by_phase[phase][connection]

    def longest_waiting(self) -> Connection | None:
        """The connection that goes if another needs its place; None if no other may go."""
        for phase in WAITING:
            for connection in self._by_phase[phase]:
                return connection
        return None
