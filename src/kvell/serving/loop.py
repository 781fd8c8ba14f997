"""The loop of an instance process: an engine, and the connections of its fronts.

::

    serving ──Drain or SIGTERM──► draining ──no work left──► drained ──sent──► ends
       │ ├── a front hangs up, or is silent ──► cancels what it has, and goes on
       └─┴── nobody can come any more ──► cancels what runs ──────────────────► ends

A child with a single front has the same loop: its front has come, and nobody comes after it.
"""

import contextlib
import selectors
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypedDict

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Drain, Event
from kvell.serving.fronts import Arrival, ConnectedFront, Fronts
from kvell.serving.gate import CommandGate, Engine, front_of
from kvell.serving.heartbeat_schedule import HeartbeatSchedule
from kvell.serving.heartbeat_sender import HeartbeatSender
from kvell.vocabulary import RequestId
from kvell.wire.bell import Bell

OUTGOING_LIMIT_BYTES = 4 << 20
LONGEST_STEP_SECONDS = 600.0
"""A loop that is inside one turn for longer is taken for one that hangs."""


class LoopSettings(TypedDict, total=False):
    """Settings of :func:`serve_fronts`."""

    outgoing_limit_bytes: int
    heartbeat_seconds: float
    longest_step_seconds: float
    clock: Clock | None


class Arrivals(Protocol):
    """Where fronts come in."""

    @property
    def descriptor(self) -> int | None:
        """Becomes readable when a front has come, or when all is over; None: never again."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the instance ends, whatever it is doing."""
        ...

    def arrivals(self) -> list[Arrival]:
        """Return the fronts that have come since the last call."""
        ...

    def left(self, front: ConnectedFront) -> None:
        """Note that a front's connection has ended."""
        ...


def serve_fronts(
    engine: Engine,
    door: Arrivals,
    *,
    owner: Callable[[RequestId], str] = front_of,
    outgoing_limit_bytes: int = OUTGOING_LIMIT_BYTES,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    longest_step_seconds: float = LONGEST_STEP_SECONDS,
    clock: Clock | None = None,
) -> None:
    """Serve all fronts that come in at a door, until the instance is drained or its door is over.

    Waits while idle, never while there is work.  While more than ``outgoing_limit_bytes`` wait for
    a front, no step is taken, and no command of that front.  In the main thread SIGTERM means
    :class:`Drain`.

    Each front is sent :class:`Ready` first, then a :class:`Heartbeat` every ``heartbeat_seconds``,
    idle or not; a thread sends them while a step computes.  It stops once the loop has been inside
    one turn for longer than ``longest_step_seconds``: a loop that hangs falls silent, and its
    fronts notice.  What a front has is cancelled when its connection ends, when it comes again, or
    when its lease is over (:class:`.ConnectedFront`); the others notice nothing.

    :param owner: names the front of a request.
    """
    clock = clock or MonotonicClock()
    gate = CommandGate(engine, owner)
    fronts = Fronts(outgoing_limit_bytes, gate.others, owner)
    schedule = HeartbeatSchedule(heartbeat_seconds, longest_step_seconds)
    heart = HeartbeatSender(engine.pulse, fronts, clock, schedule)
    with sigterm_as_readable() as terminated, selectors.DefaultSelector() as selector:
        serving = _Serving(gate, fronts, heart, selector, door, clock)
        selector.register(terminated.descriptor, selectors.EVENT_READ, "terminated")
        if door.descriptor is not None:
            selector.register(door.descriptor, selectors.EVENT_READ, "door")
        if gate.wakes is not None:
            selector.register(gate.wakes, selectors.EVENT_READ, "woken")
        try:
            serving.let_in()
            with heart:
                while not door.is_over and (not gate.drained or fronts.pending):
                    serving.turn(terminated)
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
        door: Arrivals,
        clock: Clock,
    ) -> None:
        self._gate, self._fronts, self._heart = gate, fronts, heart
        self._selector, self._door, self._clock = selector, door, clock

    def turn(self, terminated: Bell) -> None:
        """Wait for something to do unless there is some; take what came; step."""
        timeout_seconds = 0 if self._may_step() else self._heart.rests()
        for front in self._fronts:
            self._selector.modify(front.sock, front.interest(), front)
        ready = self._selector.select(timeout_seconds)
        self._heart.works()
        for key, mask in ready:
            if isinstance(key.data, ConnectedFront):
                self._serve(key.data, mask)
            elif key.data == "terminated":
                terminated.clear()
                self._tell(self._gate.accept(Drain()))
            elif key.data == "woken":
                self._tell(self._gate.woken())
            else:
                self.let_in()
        now_seconds = self._clock.now_seconds()
        for front in self._fronts:
            if front.is_over(now_seconds):
                self.drop(front)
                self._door.left(front)
        if self._may_step():
            self._tell(self._gate.advance())

    def let_in(self) -> None:
        """Take in the fronts that have come."""
        for arrival in self._door.arrivals():
            before = self._fronts.front_named(arrival.front)
            if before is not None and before.incarnation > arrival.incarnation:
                arrival.sock.close()  # it was greeted late; the front has come again since
                continue
            if before is not None:
                self.drop(before)
            front = self._fronts.add(arrival, self._gate.ready, self._clock.now_seconds())
            self._selector.register(front.sock, selectors.EVENT_READ, front)

    def drop(self, front: ConnectedFront) -> None:
        """Hang up on a front, and cancel what it has."""
        self._selector.unregister(front.sock)
        self._fronts.remove(front)
        self._tell(self._gate.cancel_of(front.name))

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


@contextlib.contextmanager
def sigterm_as_readable() -> Iterator[Bell]:
    """Yield a bell that rings on SIGTERM; outside the main thread it never does."""
    bell = Bell()
    try:
        if threading.current_thread() is not threading.main_thread():
            yield bell
            return
        previous = signal.signal(signal.SIGTERM, lambda _signal, _frame: bell.ring())
        try:
            yield bell
        finally:
            signal.signal(signal.SIGTERM, previous)
    finally:
        bell.close()
