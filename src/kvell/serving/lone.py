"""An instance of a single front: its child, or part of its process."""

import select
import socket
from typing import Unpack

from kvell.engine.protocol.messages import Command, Event
from kvell.serving.fronts import Arrival, ConnectedFront
from kvell.serving.gate import CommandGate, Engine
from kvell.serving.loop import LoopSettings, serve_fronts
from kvell.vocabulary import RequestId

LONE = ""
"""Name of a front that is alone."""


def lone_owner(_request_id: RequestId) -> str:
    """Name the front of a request where there is only one."""
    return LONE


class LoneFront:
    """The only front of an instance (:class:`.Arrivals`): it has come, and nobody comes after it.

    :param sock: a connected stream socket.
    """

    descriptor = None

    def __init__(self, sock: socket.socket) -> None:
        self._arrivals = [Arrival(LONE, sock, is_alone=True)]
        self.is_over = False

    def arrivals(self) -> list[Arrival]:
        """See :class:`.Arrivals`."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def left(self, front: ConnectedFront) -> None:
        """End the instance with its front.

        :raises ProtocolError: when the front did not speak the protocol.
        """
        self.is_over = True
        if front.problem is not None:
            raise front.problem


def serve_instance(engine: Engine, sock: socket.socket, **settings: Unpack[LoopSettings]) -> None:
    """Serve the peer at a connected stream socket until it drains or closes (:func:`serve_fronts`).

    :raises ProtocolError: when the peer does not speak the protocol.
    """
    serve_fronts(engine, LoneFront(sock), owner=lone_owner, **settings)


class LocalInstance:
    """The same protocol inside one process: no socket, no thread, and so no heartbeats."""

    def __init__(self, engine: Engine) -> None:
        self._gate = CommandGate(engine, lone_owner)
        self._events: list[Event] = [self._gate.ready]

    def send(self, command: Command) -> None:
        """Give the instance a command; its answers come with :meth:`poll`."""
        self._events += self._gate.accept(command)

    def has_work(self) -> bool:
        """Whether :meth:`poll` may still bring events without another command."""
        return bool(self._events) or self._gate.has_work() or self._gate.has_requests()

    @property
    def credits(self) -> int:
        """Most requests that the instance accepts at a time."""
        return self._gate.ready.credits

    def poll(self, *interrupts: int) -> list[Event]:
        """Run one step if there is work, else wait until requests can go on, if there are any.

        :param interrupts: descriptors that end the wait, too, once they are readable.
        :returns: all events since the last call.
        """
        if self._gate.has_work():
            self._events += self._gate.advance()
        elif not self._events and self._gate.wakes is not None and self._gate.has_requests():
            select.select([self._gate.wakes, *interrupts], [], [])
        self._events += self._gate.woken()
        return self.answers()

    def answers(self) -> list[Event]:
        """Return all events since the last call, without a step."""
        events, self._events = self._events, []
        return events
