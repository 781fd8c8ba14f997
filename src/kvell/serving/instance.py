"""A loop around an engine and the socket of its one front.

::

    serving ──Drain or SIGTERM──► draining ──no work left──► drained ──sent──► ends
       └──────────── peer closes ──► cancels what runs ──────────────────────► ends
"""

import contextlib
import select
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Command, Drain, Event
from kvell.serving.channel import Channel, PeerClosed
from kvell.serving.gate import CommandGate, Engine
from kvell.serving.heartbeat_schedule import HeartbeatSchedule
from kvell.serving.heartbeat_sender import HeartbeatSender

OUTGOING_LIMIT_BYTES = 4 << 20
LONGEST_STEP_SECONDS = 600.0
"""A loop that is inside one turn for longer is taken for one that hangs."""


class LocalInstance:
    """The same protocol inside one process: no socket, no thread, and so no heartbeats."""

    def __init__(self, engine: Engine) -> None:
        self._gate = CommandGate(engine)
        self._events: list[Event] = [self._gate.ready]

    def send(self, command: Command) -> None:
        """Give the instance a command; its answers come with :meth:`poll`."""
        self._events += self._gate.accept(command)

    def has_work(self) -> bool:
        """Whether :meth:`poll` may still bring events without another command."""
        return bool(self._events) or self._gate.has_work() or self._gate.has_requests()

    def poll(self) -> list[Event]:
        """Run one step if there is work, else wait until requests can go on, if there are any.

        :returns: all events since the last call.
        """
        if self._gate.has_work():
            self._events += self._gate.advance()
        elif not self._events and self._gate.wakes is not None and self._gate.has_requests():
            select.select([self._gate.wakes], [], [])
        self._events += self._gate.woken()
        events, self._events = self._events, []
        return events


def serve_instance(
    engine: Engine,
    sock: socket.socket,
    *,
    outgoing_limit_bytes: int = OUTGOING_LIMIT_BYTES,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    longest_step_seconds: float = LONGEST_STEP_SECONDS,
    clock: Clock | None = None,
) -> None:
    """Serve the peer at a connected stream socket until it drains or closes.

    Waits while idle, never while there is work.  While more than
    ``outgoing_limit_bytes`` wait for a slow peer, neither steps nor commands are
    taken.  In the main thread SIGTERM means :class:`Drain`.

    A :class:`Heartbeat` follows :class:`Ready` at once, and then another every
    ``heartbeat_seconds``, idle or not; a thread sends them while a step computes.
    It stops once the loop has been inside one turn for longer than
    ``longest_step_seconds``: a loop that hangs falls silent, and the front notices.

    :raises ProtocolError: when the peer does not speak the protocol.
    """
    gate = CommandGate(engine)
    channel = Channel(sock, outgoing_limit_bytes)
    rhythm = HeartbeatSchedule(heartbeat_seconds, longest_step_seconds)
    heart = HeartbeatSender(engine.pulse, channel, clock or MonotonicClock(), rhythm)
    serving = _Serving(gate, channel, heart)
    try:
        with sigterm_as_readable() as terminated, selectors.DefaultSelector() as selector:
            selector.register(terminated, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            if gate.wakes is not None:
                selector.register(gate.wakes, selectors.EVENT_READ)
            channel.queue([gate.ready])
            with heart:
                while not gate.drained or channel.pending:
                    _turn(serving, selector, sock, terminated)
    except PeerClosed:
        pass
    finally:
        gate.cancel_all()


@dataclass(frozen=True)
class _Serving:
    """What the turns of a serving loop work on."""

    gate: CommandGate
    channel: Channel
    heart: HeartbeatSender

    def take(self, command: Command) -> None:
        """Take a command, and tell what is answered at once."""
        self._tell(self.gate.accept(command))

    def wake(self) -> None:
        """Take in what came from elsewhere, and tell what came of it."""
        self._tell(self.gate.woken())

    def step(self) -> None:
        """Step, and tell what came of it."""
        self._tell(self.gate.advance())

    def may_step(self) -> bool:
        """Whether there is work, and room for what comes of it."""
        return self.gate.has_work() and not self.channel.full

    def _tell(self, events: list[Event]) -> None:
        if self.gate.drained:
            self.heart.end()  # before Drained is sent, which is the last event
        self.channel.queue(events)


def _turn(
    serving: _Serving,
    selector: selectors.BaseSelector,
    sock: socket.socket,
    terminated: socket.socket,
) -> None:
    timeout_seconds = 0 if serving.may_step() else serving.heart.rests()
    selector.modify(sock, _interest(serving.channel))
    ready = selector.select(timeout_seconds)
    serving.heart.works()
    for key, mask in ready:
        if key.fileobj is terminated:
            terminated.recv(64)
            serving.take(Drain())
        elif key.fd == serving.gate.wakes:
            serving.wake()
        elif mask & selectors.EVENT_WRITE:
            serving.channel.flush()
        if key.fileobj is sock and mask & selectors.EVENT_READ:
            for command in serving.channel.receive():
                serving.take(command)
    if serving.may_step():
        serving.step()


def _interest(channel: Channel) -> int:
    reading = 0 if channel.full else selectors.EVENT_READ
    return reading | (selectors.EVENT_WRITE if channel.pending else 0)


@contextlib.contextmanager
def sigterm_as_readable() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable on SIGTERM; outside the main thread it never does."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def note(_signal: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            writer.send(b"t")

    with reader, writer:
        if threading.current_thread() is not threading.main_thread():
            yield reader
            return
        previous = signal.signal(signal.SIGTERM, note)
        try:
            yield reader
        finally:
            signal.signal(signal.SIGTERM, previous)
