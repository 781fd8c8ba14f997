"""Heartbeats of an instance: from its loop, or from a thread while the loop is in a step."""

import threading
from types import TracebackType
from typing import Protocol

from kvell.clock import Clock
from kvell.serving.heartbeat_schedule import HeartbeatSchedule
from kvell.wire.buffered import PeerClosedError


class Listeners(Protocol):
    """The receivers of heartbeats."""

    lock: threading.RLock
    """The lock of the send buffers."""

    def beat(self) -> None:
        """Send a heartbeat with the load now, from the loop."""
        ...

    def beat_again(self) -> None:
        """Send the last heartbeat again, from the heartbeat thread."""
        ...


class HeartbeatSender:
    """The caller of ``listeners`` whenever a heartbeat is due, from ``with`` until :meth:`end`.

    The loop calls :meth:`works`, which sends a fresh heartbeat, and :meth:`rests`.  While a step
    takes longer than the time between two beats, a daemon thread sends the last one again; it never
    calls the engine.  If bytes are buffered for the peer, the thread sends only these, which is a
    sign of life as well.
    """

    def __init__(self, listeners: Listeners, clock: Clock, rhythm: HeartbeatSchedule) -> None:
        self._listeners = listeners
        self._clock = clock
        self._rhythm = rhythm
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvell-heart", daemon=True)

    def __enter__(self) -> "HeartbeatSender":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def works(self) -> None:
        """Note that the loop begins a turn; beat if it is time."""
        now_seconds = self._clock.now_seconds()
        is_due = self._rhythm.is_due(now_seconds) and not self._ended.is_set()
        if is_due:  # noted before the turn, so that the thread does not beat as well
            self._rhythm.beats(now_seconds)
        self._rhythm.works(now_seconds)
        if is_due:
            self._listeners.beat()

    def rests(self) -> float | None:
        """Note that the loop waits for its peer.

        :returns: seconds until the next beat is due; None if none will be.
        """
        with self._listeners.lock:  # afterwards, only the loop adds unsent bytes
            self._rhythm.rests()
        if self._ended.is_set():
            return None
        return self._rhythm.seconds_to_beat(self._clock.now_seconds())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._pause_seconds()):
            try:
                self._beat_alone()
            except PeerClosedError:
                return  # the loop meets the same error when it next sends or receives

    def _pause_seconds(self) -> float:
        remaining_seconds = self._rhythm.seconds_to_beat(self._clock.now_seconds())
        return remaining_seconds or self._rhythm.beat_seconds

    def _beat_alone(self) -> None:
        with self._listeners.lock:
            now_seconds = self._clock.now_seconds()
            if self._rhythm.may_beat_alone(now_seconds):
                self._rhythm.beats(now_seconds, alone=True)
                self._listeners.beat_again()
