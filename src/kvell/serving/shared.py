"""A loop around an engine and the connections of several fronts, which come and go.

::

    serving ──Drain or SIGTERM──► draining ──no work left──► drained ──sent──► ends
       │ ├── a front hangs up, or is silent ──► cancels what it has, and goes on
       └─┴── the keeper ends ──► cancels what runs ───────────────────────────► ends
"""

import selectors
import socket

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Drain, Event
from kvell.serving.door import FrontDoor
from kvell.serving.fronts import ConnectedFront, Fronts
from kvell.serving.gate import CommandGate, Engine
from kvell.serving.heartbeat_schedule import HeartbeatSchedule
from kvell.serving.heartbeat_sender import HeartbeatSender
from kvell.serving.instance import (
    LONGEST_STEP_SECONDS,
    OUTGOING_LIMIT_BYTES,
    sigterm_as_readable,
)


def serve_fronts(
    engine: Engine,
    door: FrontDoor,
    *,
    outgoing_limit_bytes: int = OUTGOING_LIMIT_BYTES,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    longest_step_seconds: float = LONGEST_STEP_SECONDS,
    clock: Clock | None = None,
) -> None:
    """Serve all that come in at a door, until the instance is drained or its keeper ends.

    Each is told :class:`Ready` first, and heartbeats as of :func:`.serve_instance`.  What a front
    has is cancelled when its connection ends, when it comes again, or when it says nothing for
    ``FRONT_LEASE_SECONDS``; the others notice nothing.
    """
    clock = clock or MonotonicClock()
    gate = CommandGate(engine, is_shared=True)
    fronts = Fronts(outgoing_limit_bytes, gate.others)
    heart = HeartbeatSender(
        engine.pulse, fronts, clock, HeartbeatSchedule(heartbeat_seconds, longest_step_seconds)
    )
    with sigterm_as_readable() as terminated, selectors.DefaultSelector() as selector, heart:
        serving = _Serving(gate, fronts, heart, selector, clock)
        selector.register(terminated, selectors.EVENT_READ, "terminated")
        selector.register(door.descriptor, selectors.EVENT_READ, "door")
        if gate.wakes is not None:
            selector.register(gate.wakes, selectors.EVENT_READ, "woken")
        try:
            while not door.is_over and (not gate.drained or fronts.pending):
                serving.turn(terminated, door)
        finally:
            for front in fronts:
                serving.drop(front)
            gate.cancel_all()


class _Serving:
    """What the turns of the loop work on."""

    def __init__(
        self,
        gate: CommandGate,
        fronts: Fronts,
        heart: HeartbeatSender,
        selector: selectors.BaseSelector,
        clock: Clock,
    ) -> None:
        self._gate, self._fronts, self._heart = gate, fronts, heart
        self._selector, self._clock = selector, clock

    def turn(self, terminated: socket.socket, door: FrontDoor) -> None:
        """Wait for something to do unless there is some; take what came; step."""
        timeout_seconds = 0 if self._may_step() else self._heart.rests()
        for front in self._fronts:
            self._selector.modify(front.sock, _interest(front), front)
        ready = self._selector.select(timeout_seconds)
        self._heart.works()
        for key, mask in ready:
            if isinstance(key.data, ConnectedFront):
                self._serve(key.data, mask)
            elif key.data == "terminated":
                terminated.recv(64)
                self._tell(self._gate.accept(Drain()))
            elif key.data == "woken":
                self._tell(self._gate.woken())
            else:
                self._let_in(door)
        now_seconds = self._clock.now_seconds()
        for front in self._fronts:
            if front.is_over(now_seconds):
                self.drop(front)
        if self._may_step():
            self._tell(self._gate.advance())

    def drop(self, front: ConnectedFront) -> None:
        """Hang up on a front, and cancel what it has."""
        self._selector.unregister(front.sock)
        self._fronts.remove(front)
        self._tell(self._gate.cancel_of(front.name))

    def _let_in(self, door: FrontDoor) -> None:
        for name, sock in door.arrivals():
            for before in self._fronts:
                if before.name == name:
                    self.drop(before)
            front = self._fronts.add(name, sock, self._gate.ready, self._clock.now_seconds())
            self._selector.register(front.sock, selectors.EVENT_READ, front)

    def _serve(self, front: ConnectedFront, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            front.flush()
        if mask & selectors.EVENT_READ:
            for command in front.receive(self._clock.now_seconds()):
                self._tell(self._gate.accept(command, front.name), front.name)

    def _may_step(self) -> bool:
        """Whether there is work, and room for what comes of it."""
        return self._gate.has_work() and not self._fronts.full

    def _tell(self, events: list[Event], asked: str | None = None) -> None:
        if self._gate.drained:
            self._heart.end()  # before Drained is sent, which is the last event
        for stray in self._fronts.tell(events, asked):
            self._tell(self._gate.cancel(stray))


def _interest(front: ConnectedFront) -> int:
    reading = 0 if front.channel.full else selectors.EVENT_READ
    interest = reading | (selectors.EVENT_WRITE if front.channel.pending else 0)
    return interest or selectors.EVENT_WRITE
