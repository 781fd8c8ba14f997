"""An instance with a single front: a child of the front, or part of its process."""

import select
import socket
from typing import Unpack

from kvell.engine.protocol.messages import Command, Event
from kvell.serving.fronts import Arrival, ConnectedFront
from kvell.serving.gate import LONE, CommandGate, Engine, lone_owner
from kvell.serving.loop import LoopSettings, serve_fronts


class LoneFront:
    """The :class:`.Arrivals` of an instance whose only front is already connected."""

    descriptor = None

    def __init__(self, sock: socket.socket) -> None:
        self._arrivals = [Arrival(LONE, sock, is_alone=True)]
        self.is_over = False

    def arrivals(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def on_left(self, front: ConnectedFront) -> None:
        """End the instance with its front.

        :raises ProtocolError: if the front violated the protocol.
        """
        self.is_over = True
        if front.problem is not None:
            raise front.problem


def serve_instance(engine: Engine, sock: socket.socket, **settings: Unpack[LoopSettings]) -> None:
    """Serve the peer at a connected stream socket until it drains or closes (:func:`serve_fronts`).

    :raises ProtocolError: if the peer violates the protocol.
    """
    serve_fronts(engine, LoneFront(sock), owner=lone_owner, **settings)


class LocalInstance:
    """An instance inside the caller's process: no socket, no thread, and so no heartbeats."""

    def __init__(self, engine: Engine) -> None:
        self._gate = CommandGate(engine, lone_owner)
        self._events: list[Event] = [self._gate.ready]

    def send(self, command: Command) -> None:
        self._events += self._gate.accept(command)

    def has_work(self) -> bool:
        return bool(self._events) or self._gate.has_work() or self._gate.has_requests()

    @property
    def credits(self) -> int:
        return self._gate.ready.facts.credits

    def poll(self, *interrupts: int) -> list[Event]:
        """Run one step if there is work; else wait, if there are requests, until they can continue.

        :param interrupts: descriptors that also end the wait once they are readable.
        :returns: all events since the last call.
        """
        if self._gate.has_work():
            self._events += self._gate.advance()
        elif (
            not self._events
            and (wakes := self._gate.wakes()) is not None
            and self._gate.has_requests()
        ):
            select.select([wakes, *interrupts], [], [])
        self._events += self._gate.woken()
        return self.answers()

    def answers(self) -> list[Event]:
        events, self._events = self._events, []
        return events
