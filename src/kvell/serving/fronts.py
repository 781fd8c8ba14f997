"""The connections of an instance to its fronts, and the routing of events to them.

The listener of an instance for fronts on several machines.

::

    keeper ── stdin: the secret ──► instance ── stdout: its address ──► keeper
                                        ▲
    fronts, manager ── connect ─────────┘  both sides prove that they have the secret
      keeper ── stdin ends ──► the instance closes all connections, and exits

The keeper holds the other end of stdin open, so an instance exits when its keeper dies.
"""

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import (
    FRONT_LEASE_SECONDS,
    Acknowledgement,
    Command,
    Event,
    Finished,
    Heartbeat,
    MigrationRefused,
    OtherFronts,
    Ready,
    Tokens,
)
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.engine.protocol.statistics import LoadStats
from kvell.mempool.rendezvous import SECRET_BYTES
from kvell.serving.gate import NAME_END
from kvell.vocabulary import RequestId
from kvell.wire.bell import Bell
from kvell.wire.buffered import BufferedSocket, PeerClosedError
from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import listen_at, tcp_endpoint
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import Greeting
from kvell.wire.session import check_secret

UNREAD_SECONDS = 2.0
"""A front that blocks the others for this time is disconnected."""
FORGIVEN = 0.25
"""Seconds that each second without blocking takes off a front's blocking time."""
LOOK_SECONDS = 1.0
"""The most seconds that count between two checks: a pause of the instance itself must not be
charged to a front."""
OF_A_REQUEST = Acknowledgement | PromptLogprobs | Tokens | Finished | MigrationRefused


@dataclass(frozen=True)
class Arrival:
    """A new connection of a front.

    :param incarnation: of two connections of one front, the higher incarnation is newer.
    :param is_alone: whether this is the only front, and its process ends with the connection.
    """

    front: str
    sock: socket.socket
    incarnation: int = 0
    is_alone: bool = False


class ConnectedFront:
    """A connected front, with a send buffer of limited size.

    Two threads may send: the loop and the heartbeat thread.  Whole frames are appended to the
    buffer under the lock, and only the buffer is sent, so frames are never interleaved.  Only
    the loop receives.

    Its lease expires when the front is silent for ``FRONT_LEASE_SECONDS``, or has blocked the
    others for ``UNREAD_SECONDS`` because its send buffer was full.  Blocking time adds up, and
    falls at a quarter of this speed, so that a front cannot go on blocking by reading a little
    now and then.  A front that is alone has no lease.

    :ivar watches: whether the front receives notices of the prefix index.
    """

    def __init__(self, arrival: Arrival, outgoing_limit_bytes: int, now_seconds: float) -> None:
        self.name, self.sock = arrival.front, arrival.sock
        self.incarnation = arrival.incarnation
        self.watches = False
        self.problem: ProtocolError | None = None
        self._lock = threading.RLock()
        self._line = BufferedSocket(arrival.sock)
        self._limit_bytes = outgoing_limit_bytes
        self._beat = b""
        self._is_alone = arrival.is_alone
        self.is_gone = False
        self._heard_seconds = self._looked_seconds = now_seconds
        self._holds_up, self._held_up_seconds = False, 0.0

    @property
    def pending(self) -> bool:
        return self._line.unsent_bytes > 0

    @property
    def full(self) -> bool:
        """Whether the unsent bytes have reached the limit."""
        return self._line.unsent_bytes >= self._limit_bytes

    def send(self, events: Iterable[Event]) -> None:
        self._send(b"".join(encode_frame(event) for event in events))

    def flush(self) -> None:
        self._send(b"")

    def send_beat(self, beat: Heartbeat) -> None:
        if not self.full:
            self._beat = encode_frame(beat)
            self._send(self._beat)

    def beat_again(self) -> None:
        """Send the last heartbeat again if the buffer is empty; else flush the buffer."""
        with self._lock:
            self._send(b"" if self.pending else self._beat)

    def _send(self, frames: bytes) -> None:
        try:
            with self._lock:
                self._line.send(frames)
        except PeerClosedError:
            self.is_gone = True

    def receive(self, now_seconds: float) -> list[Command]:
        """Return the commands that have arrived; none once the connection has ended."""
        self._heard_seconds = now_seconds
        try:
            commands = [decode_command(body) for body in self._line.receive()]
        except ProtocolError as problem:  # of this front: the others go on
            self.problem = problem
            self.is_gone = True
            return []
        except PeerClosedError:
            self.is_gone = True
            return []
        self.watches |= any(isinstance(command, WatchIndex) for command in commands)
        return commands

    def interest(self) -> int:
        """Return the events to select its socket for; while the buffer is full, do not read."""
        self._holds_up = self.full
        if self._holds_up:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.pending else 0)

    def is_over(self, now_seconds: float) -> bool:
        """Return whether the connection or the lease has ended.  Call it after each wait."""
        since_look_seconds = min(LOOK_SECONDS, now_seconds - self._looked_seconds)
        self._looked_seconds = now_seconds
        if self._holds_up:
            self._held_up_seconds += since_look_seconds
        else:
            forgiven_seconds = FORGIVEN * since_look_seconds
            self._held_up_seconds = max(0.0, self._held_up_seconds - forgiven_seconds)
        if self.is_gone or self._is_alone:
            return self.is_gone
        is_silent = now_seconds - self._heard_seconds > FRONT_LEASE_SECONDS
        return is_silent or self._held_up_seconds > UNREAD_SECONDS


class Fronts:
    """All connected fronts; the loop's thread changes them, the heartbeat thread only sends.

    :param pulse: returns the load now; called from the loop's thread, when a heartbeat is due.
    """

    def __init__(
        self,
        outgoing_limit_bytes: int,
        pulse: Callable[[], LoadStats],
        others: Callable[[str], OtherFronts],
        owner: Callable[[RequestId], str],
    ) -> None:
        self.lock = threading.RLock()
        """The lock of the connections."""
        self._limit_bytes, self._owner = outgoing_limit_bytes, owner
        self._pulse, self._others = pulse, others
        self.by_name: dict[str, ConnectedFront] = {}

    @property
    def pending(self) -> bool:
        return any(front.pending for front in self.by_name.values())

    @property
    def full(self) -> bool:
        return any(front.full for front in self.by_name.values())

    def add(self, arrival: Arrival, ready: Ready, now_seconds: float) -> ConnectedFront:
        front = ConnectedFront(arrival, self._limit_bytes, now_seconds)
        with self.lock:
            self.by_name[front.name] = front
            front.send([ready])
        return front

    def remove(self, front: ConnectedFront) -> None:
        with self.lock:
            del self.by_name[front.name]
            with contextlib.suppress(OSError):
                front.sock.shutdown(socket.SHUT_RDWR)
            front.sock.close()

    def tell(self, events: Iterable[Event], sender: str | None) -> list[RequestId]:
        """Send each event to its fronts.

        :param sender: the front whose command the events answer, or None.
        :returns: requests of fronts that are not connected.
        """
        events_by_front: dict[str, list[Event]] = {}
        strays: list[RequestId] = []
        for event in events:
            if isinstance(event, OF_A_REQUEST):
                name = self._owner(event.request_id)
                if name not in self.by_name and sender is not None:
                    name = sender  # its refusal: the id lacks the front's name
                if name in self.by_name:
                    events_by_front.setdefault(name, []).append(event)
                elif not isinstance(event, Finished):
                    strays.append(event.request_id)
                continue
            if isinstance(event, IndexNotice):
                names = [front.name for front in self.by_name.values() if front.watches]
            else:
                names = [sender] if sender is not None else list(self.by_name)
            for name in names:
                events_by_front.setdefault(name, []).append(event)
        for name, sent in events_by_front.items():
            if name in self.by_name:
                self.by_name[name].send(sent)
        return strays

    def beat(self) -> None:
        """Send each front a heartbeat with the load of the others, from the loop."""
        load = self._pulse()
        with self.lock:
            for front in self.by_name.values():
                front.send_beat(Heartbeat(load, self._others(front.name)))

    def beat_again(self) -> None:
        """Send the last heartbeats again, from the heartbeat thread."""
        with self.lock:
            for front in self.by_name.values():
                front.beat_again()


LEASH_BYTES = 4096


def read_secret(descriptor: int) -> bytes:
    """Read the cluster's secret, the first ``SECRET_BYTES`` of a pipe.

    :raises ProtocolError: if the pipe ends earlier.
    """
    secret = b""
    while len(secret) < SECRET_BYTES:
        piece = os.read(descriptor, SECRET_BYTES - len(secret))
        if not piece:
            raise ProtocolError(f"the secret has {len(secret)} of {SECRET_BYTES} bytes")
        secret += piece
    return secret


class FrontListener:
    """A listener for fronts; authenticated connections queue until the loop accepts them.

    :param instance: name that is sent to fronts, with ``incarnation``.
    :raises ChangeSomething: if the address cannot be bound, or the secret is too short.
    :ivar address: like ``tcp://10.0.0.1:5000``.
    """

    def __init__(self, host: str, secret: bytes, instance: str, incarnation: int) -> None:
        check_secret(secret)
        self._arrived: deque[Arrival] = deque()
        self._bell = Bell()
        self.is_over = False
        listener = listen_at(tcp_endpoint(host, 0))
        greeting = Greeting(instance, incarnation, "", 0)
        self._doorway = Doorway(listener, greeting, secret, {"commands": self._enters})
        self.address = str(self._doorway.address)
        self._doorway.open()

    def __enter__(self) -> "FrontListener":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        return self._bell.descriptor

    def on_left(self, front: ConnectedFront) -> None:
        """Do nothing: other fronts may connect (:class:`.Arrivals`)."""

    def arrivals(self) -> list[Arrival]:
        self._bell.clear()
        arrivals = []
        while self._arrived:
            arrivals.append(self._arrived.popleft())
        return arrivals

    def ends_with(self, descriptor: int) -> threading.Thread:
        """Set :attr:`is_over` when a pipe ends because the process at its other end closes it."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                while os.read(descriptor, LEASH_BYTES):
                    pass  # the keeper sends nothing more
            self.is_over = True
            self._bell.ring()

        thread = threading.Thread(target=wait, name="kvell-leash", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._doorway.close()
        for arrival in self.arrivals():
            arrival.sock.close()
        self._bell.close()

    def _enters(self, greeting: Greeting, sock: socket.socket) -> None:
        if not greeting.instance or NAME_END in greeting.instance:
            raise ProtocolError("a front's name must be a word")
        self._arrived.append(Arrival(greeting.instance, sock, greeting.incarnation))
        self._bell.ring()
