"""The instance's side of the protocol: a loop around an engine and a socket.

::

    serving ──Drain or SIGTERM──► draining ──no work left──► drained ──sent──► ends
       └──────────── peer closes ──► cancels what runs ──────────────────────► ends
"""

import contextlib
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.channel import Channel, PeerClosed
from kvell.engine.protocol.heart import Heart
from kvell.engine.protocol.messages import (
    HEARTBEAT_SECONDS,
    Cancel,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    Heartbeat,
    Ready,
    Submit,
)
from kvell.engine.protocol.rhythm import Rhythm
from kvell.vocabulary import RequestId

OUTGOING_LIMIT_BYTES = 4 << 20
LONGEST_STEP_SECONDS = 600.0
"""A loop that is inside one turn for longer is taken for one that hangs."""


class Engine(Protocol):
    """What the loop needs of an engine; it is called from one thread."""

    def ready(self) -> Ready:
        """What this engine can serve, and how many requests at once (credits)."""
        ...

    def handle(self, command: Command) -> list[Event]:
        """Take a command; events that need no step are returned at once."""
        ...

    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""
        ...

    def has_requests(self) -> bool:
        """Whether any request has not ended, if none needs a step; some come from elsewhere."""
        ...

    def step(self) -> list[Event]:
        """One plan, run and commit."""
        ...

    def wakes(self) -> int | None:
        """A descriptor that becomes readable when :meth:`woken` has something; None: never."""
        ...

    def woken(self) -> list[Event]:
        """Take in what came from elsewhere than the front."""
        ...

    def pulse(self) -> Heartbeat:
        """What there is between two steps; called when a heartbeat is due, not at every step."""
        ...


class CommandGate:
    """Enforces credits and draining around an engine, for both kinds of instance."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight: set[RequestId] = set()
        self._draining = False
        self.ready = engine.ready()
        self.drained = False

    def accept(self, command: Command) -> list[Event]:
        """Pass a command on, or refuse it; returns what can be answered at once."""
        if isinstance(command, Submit):
            return self._submit(command)
        if isinstance(command, Drain):
            if self._draining:
                return []
            self._draining = True
        return self._after(self._engine.handle(command))

    def has_work(self) -> bool:
        """Whether :meth:`advance` would do anything."""
        return self._engine.has_work()

    def advance(self) -> list[Event]:
        """One step of the engine."""
        return self._after(self._engine.step())

    @property
    def wakes(self) -> int | None:
        """See :meth:`Engine.wakes`."""
        return self._engine.wakes()

    def woken(self) -> list[Event]:
        """See :meth:`Engine.woken`."""
        return self._after(self._engine.woken())

    def cancel_all(self) -> None:
        """Cancel all requests in flight; nobody listens any more."""
        for request_id in sorted(self._in_flight):
            self._engine.handle(Cancel(request_id))
        self._in_flight.clear()

    def _submit(self, command: Submit) -> list[Event]:
        if self._draining:
            refusal = _refusal(command, "the instance is draining")
            return [replace(refusal, not_taken=True)]
        if command.request_id in self._in_flight:
            return [_refusal(command, "a request with this id is in flight")]
        if len(self._in_flight) >= self.ready.credits:
            return [_refusal(command, f"all {self.ready.credits} credits are in use")]
        self._in_flight.add(command.request_id)
        return self._after(self._engine.handle(command))

    def _after(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Finished):
                self._in_flight.discard(event.request_id)
        # Drained ends the process, so it is sent from here, once, and never passed on.
        kept: list[Event] = [event for event in events if not isinstance(event, Drained)]
        is_idle = not self._engine.has_requests() and not self._in_flight
        if self._draining and not self.drained and is_idle:
            self.drained = True
            kept.append(Drained())
        return kept


def _refusal(command: Submit, why: str) -> Finished:
    return Finished(command.request_id, command.attempt, "refused", message=why, try_later=True)


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
        return bool(self._events) or self._gate.has_work()

    def poll(self) -> list[Event]:
        """Run one step if there is work; return all events since the last call."""
        if self._gate.has_work():
            self._events += self._gate.advance()
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
    rhythm = Rhythm(heartbeat_seconds, longest_step_seconds)
    heart = Heart(engine.pulse, channel, clock or MonotonicClock(), rhythm)
    serving = _Serving(gate, channel, heart)
    try:
        with _sigterm_as_readable() as terminated, selectors.DefaultSelector() as selector:
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
    heart: Heart

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
def _sigterm_as_readable() -> Iterator[socket.socket]:
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
