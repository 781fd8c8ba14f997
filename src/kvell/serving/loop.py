"""The loop of an instance process around its engine and the connections of its fronts.

::

    serving ──Drain or SIGTERM──► draining ──no work left──► drained ──sent──► ends
       │ ├── a front disconnects, or is silent ──► cancels its requests, goes on
       └─┴── no front can connect any more ──► cancels all requests ──────────► ends

A child with a single front runs the same loop, with that front connected from the start.
"""

import contextlib
import math
import selectors
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypedDict

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Drain, Event
from kvell.serving.fronts import Arrival, ConnectedFront, Fronts
from kvell.serving.gate import CommandGate, Engine, front_of
from kvell.vocabulary import RequestId
from kvell.wire.bell import Bell


class HeartbeatSchedule:
    """The state of the instance's loop, and the time of the next heartbeat.

    ::

        resting ──works──► working ──works──► working (the next turn) ──rests──► resting

    A resting loop waits for its peer, and wakes when a beat is due.  A working loop beats between
    its steps; during a step another thread beats in its place, up to a limit: a turn that takes
    too long means that the loop hangs, and such an instance must fall silent.  The other thread
    repeats the last heartbeat, so the loop sends a fresh one at its next turn.

    All times are seconds of one clock that never runs backwards.
    """

    def __init__(self, beat_seconds: float, longest_turn_seconds: float) -> None:
        """:param beat_seconds: time from one beat to the next.
        :param longest_turn_seconds: after this time in one turn, the other thread stops beating.
        """
        self.beat_seconds = beat_seconds
        self._longest_turn_seconds = longest_turn_seconds
        self._next_beat_seconds = -math.inf
        self._working_since_seconds: float | None = None
        self._owes_news = False

    def works(self, now_seconds: float) -> None:
        self._working_since_seconds = now_seconds

    def rests(self) -> None:
        self._working_since_seconds = None

    def beats(self, now_seconds: float, *, alone: bool = False) -> None:
        """Note that a beat is sent; ``alone``: by the other thread."""
        self._next_beat_seconds = now_seconds + self.beat_seconds
        self._owes_news = alone

    def is_due(self, now_seconds: float) -> bool:
        """Return whether the loop should beat: first, when due, or after the other thread did."""
        return self._owes_news or now_seconds >= self._next_beat_seconds

    def may_beat_alone(self, now_seconds: float) -> bool:
        """Return whether a beat is due, and the other thread may send it for the busy loop."""
        since_seconds = self._working_since_seconds  # read once: the loop's thread may change it
        if since_seconds is None or now_seconds < self._next_beat_seconds:
            return False
        return now_seconds - since_seconds <= self._longest_turn_seconds

    def seconds_to_beat(self, now_seconds: float) -> float:
        """Return the time until a beat is due; 0 if it is."""
        return max(0.0, self._next_beat_seconds - now_seconds)


class HeartbeatSender:
    """The caller of ``fronts`` whenever a heartbeat is due, from ``with`` until :meth:`end`.

    The loop calls :meth:`works`, which sends a fresh heartbeat, and :meth:`rests`.  While a step
    takes longer than the time between two beats, a daemon thread sends the last one again; it never
    calls the engine.  If bytes are buffered for the peer, the thread sends only these, which is a
    sign of life as well.
    """

    def __init__(self, fronts: Fronts, clock: Clock, rhythm: HeartbeatSchedule) -> None:
        self._fronts = fronts
        self._clock = clock
        self._rhythm = rhythm
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvell-heart", daemon=True)

    def __enter__(self) -> "HeartbeatSender":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def works(self) -> float:
        """Note that the loop begins a turn; beat if it is time; return the time."""
        now_seconds = self._clock.now_seconds()
        is_due = self._rhythm.is_due(now_seconds) and not self._ended.is_set()
        if is_due:  # noted before the turn, so that the thread does not beat as well
            self._rhythm.beats(now_seconds)
        self._rhythm.works(now_seconds)
        if is_due:
            self._fronts.beat()
        return now_seconds

    def rests(self) -> float | None:
        """Note that the loop waits for its peer.

        :returns: seconds until the next beat is due; None if none will be.
        """
        with self._fronts.lock:  # afterwards, only the loop adds unsent bytes
            self._rhythm.rests()
        if self._ended.is_set():
            return None
        return self._rhythm.seconds_to_beat(self._clock.now_seconds())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        rhythm, now_seconds = self._rhythm, self._clock.now_seconds
        while not self._ended.wait(rhythm.seconds_to_beat(now_seconds()) or rhythm.beat_seconds):
            with self._fronts.lock:
                now = now_seconds()
                if rhythm.may_beat_alone(now):
                    rhythm.beats(now, alone=True)
                    self._fronts.beat_again()


OUTGOING_LIMIT_BYTES = 4 << 20
LONGEST_STEP_SECONDS = 600.0
"""A loop that is inside one turn for longer counts as hanging."""


class LoopSettings(TypedDict, total=False):
    """Settings of :func:`serve_fronts`."""

    outgoing_limit_bytes: int
    heartbeat_seconds: float
    longest_step_seconds: float
    clock: Clock | None


class Arrivals(Protocol):
    """The source of new front connections."""

    @property
    def descriptor(self) -> int | None:
        """A descriptor, readable when a front has connected or :attr:`is_over` is set; or None."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the instance must end now, with or without requests."""
        ...

    def arrivals(self) -> list[Arrival]:
        """Return the fronts that have connected since the last call."""
        ...

    def on_left(self, front: ConnectedFront) -> None:
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
    """Serve all fronts that connect, until the instance is drained or ``door.is_over``.

    The loop waits only while there is no work.  While ``outgoing_limit_bytes`` are buffered for a
    front, the loop runs no step and reads no command of that front.  In the main thread SIGTERM
    means :class:`Drain`.

    Each front receives ``Ready`` first, then a ``Heartbeat`` every ``heartbeat_seconds``.
    A thread sends heartbeats while a step computes, but stops once the loop has been inside one
    turn for longer than ``longest_step_seconds``: then the fronts see that the loop hangs.  A
    front's requests are cancelled when its connection ends, when it connects again, or when its
    lease expires (:class:`.ConnectedFront`); other fronts are not affected.
    """
    clock = clock or MonotonicClock()
    gate = CommandGate(engine, owner)
    fronts = Fronts(outgoing_limit_bytes, engine.pulse, gate.others, owner)
    schedule = HeartbeatSchedule(heartbeat_seconds, longest_step_seconds)
    heart = HeartbeatSender(fronts, clock, schedule)
    with sigterm_as_readable() as terminated, selectors.DefaultSelector() as selector:
        serving = _Serving(gate, fronts, heart, selector, door, clock)
        selector.register(terminated.descriptor, selectors.EVENT_READ, "terminated")
        if door.descriptor is not None:
            selector.register(door.descriptor, selectors.EVENT_READ, "door")
        if (wakes := gate.wakes()) is not None:
            selector.register(wakes, selectors.EVENT_READ, "woken")
        try:
            serving.let_in()
            with heart:
                while not door.is_over and (not gate.drained or fronts.pending):
                    serving.turn(terminated)
        finally:
            for front in list(fronts.by_name.values()):
                serving.drop(front)
            gate.cancel_all()


class _Serving:
    """The state of the loop."""

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
        """Wait unless there is work; handle commands and events; run a step if there is work."""
        may_step = self._may_step()
        timeout_seconds = 0 if may_step else self._heart.rests()
        for front in self._fronts.by_name.values():
            self._selector.modify(front.sock, front.interest(), front)
        ready = self._selector.select(timeout_seconds)
        now_seconds = self._heart.works()
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
        over = [front for front in self._fronts.by_name.values() if front.is_over(now_seconds)]
        for front in over:
            self.drop(front)
            self._door.on_left(front)
        if ready or over:
            may_step = self._may_step()
        if may_step:
            self._tell(self._gate.advance())

    def let_in(self) -> None:
        for arrival in self._door.arrivals():
            before = self._fronts.by_name.get(arrival.front)
            if before is not None and before.incarnation > arrival.incarnation:
                arrival.sock.close()  # late: the front has already connected again
                continue
            if before is not None:
                self.drop(before)
            front = self._fronts.add(arrival, self._gate.ready, self._clock.now_seconds())
            self._selector.register(front.sock, selectors.EVENT_READ, front)

    def drop(self, front: ConnectedFront) -> None:
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
        return self._gate.has_work() and not self._fronts.full

    def _tell(self, events: list[Event], sender: str | None = None) -> None:
        if self._gate.drained:
            self._heart.end()  # before Drained, the last event, is sent
        for stray in self._fronts.tell(events, sender):
            self._tell(self._gate.cancel(stray))


@contextlib.contextmanager
def sigterm_as_readable() -> Iterator[Bell]:
    """Yield a bell that rings on SIGTERM; outside the main thread it never rings."""
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
