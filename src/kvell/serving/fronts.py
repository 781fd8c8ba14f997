"""The connections of an instance to its fronts, and the routing of events to them."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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
from kvell.serving.channel import Channel
from kvell.vocabulary import RequestId
from kvell.wire.buffered import PeerClosedError
from kvell.wire.frames import ProtocolError

UNREAD_SECONDS = 2.0
"""A front that blocks the others for this time is disconnected."""
FORGIVEN = 0.25
"""Seconds that each second without blocking takes off a front's blocking time."""
LOOK_SECONDS = 1.0
"""The most seconds that count between two checks: a pause of the instance itself must not be
charged to a front."""
"""The errors of an ended connection."""
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
    """A connected front.

    Its lease expires when the front is silent for ``FRONT_LEASE_SECONDS``, or has blocked the
    others for ``UNREAD_SECONDS`` because its send buffer was full.  Blocking time adds up, and
    falls at a quarter of this speed, so that a front cannot go on blocking by reading a little
    now and then.  A front that is alone has no lease.

    :ivar is_gone: whether the connection has ended.
    :ivar watches: whether the front receives notices of the prefix index.
    :ivar problem: the front's violation of the protocol.
    """

    def __init__(self, arrival: Arrival, channel: Channel, now_seconds: float) -> None:
        self.name, self.sock = arrival.front, arrival.sock
        self.incarnation = arrival.incarnation
        self.channel = channel
        self.watches = False
        self.problem: ProtocolError | None = None
        self._is_alone = arrival.is_alone
        self.is_gone = False
        self._heard_seconds = self._looked_seconds = now_seconds
        self._holds_up, self._held_up_seconds = False, 0.0

    def send(self, events: Iterable[Event]) -> None:
        try:
            self.channel.queue(events)
        except PeerClosedError:
            self.is_gone = True

    def flush(self) -> None:
        """Send buffered bytes."""
        try:
            self.channel.flush()
        except PeerClosedError:
            self.is_gone = True

    def receive(self, now_seconds: float) -> list[Command]:
        """Return the commands that have arrived; none once the connection has ended."""
        self._heard_seconds = now_seconds
        try:
            commands = self.channel.receive()
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
        self._holds_up = self.channel.full
        reading = 0 if self._holds_up else selectors.EVENT_READ
        interest = reading | (selectors.EVENT_WRITE if self.channel.pending else 0)
        return interest or selectors.EVENT_WRITE

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
    :param others: returns the load from all fronts but one.
    :param owner: returns the name of a request's front.
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
        self._by_name: dict[str, ConnectedFront] = {}

    def __iter__(self) -> Iterator[ConnectedFront]:
        return iter(list(self._by_name.values()))

    def front_named(self, name: str) -> ConnectedFront | None:
        """Return the connected front of this name, or None."""
        return self._by_name.get(name)

    @property
    def pending(self) -> bool:
        """Whether unsent bytes are buffered for a front."""
        return any(front.channel.pending for front in self._by_name.values())

    @property
    def full(self) -> bool:
        return any(front.channel.full for front in self._by_name.values())

    def add(self, arrival: Arrival, ready: Ready, now_seconds: float) -> ConnectedFront:
        """Add a front and send it :class:`Ready`."""
        channel = Channel(arrival.sock, self._limit_bytes)
        front = ConnectedFront(arrival, channel, now_seconds)
        with self.lock:
            self._by_name[front.name] = front
            front.send([ready])
        return front

    def remove(self, front: ConnectedFront) -> None:
        with self.lock:
            del self._by_name[front.name]
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
                if name not in self._by_name and sender is not None:
                    name = sender  # its refusal: the id lacks the front's name
                if name in self._by_name:
                    events_by_front.setdefault(name, []).append(event)
                elif not isinstance(event, Finished):
                    strays.append(event.request_id)
                continue
            if isinstance(event, IndexNotice):
                names = [front.name for front in self._by_name.values() if front.watches]
            else:
                names = [sender] if sender is not None else list(self._by_name)
            for name in names:
                events_by_front.setdefault(name, []).append(event)
        for name, sent in events_by_front.items():
            if name in self._by_name:
                self._by_name[name].send(sent)
        return strays

    def beat(self) -> None:
        """Send each front a heartbeat with the load of the others (:class:`.Listeners`)."""
        load = self._pulse()
        with self.lock:
            for front in self._by_name.values():
                try:
                    front.channel.beat(Heartbeat(load, self._others(front.name)))
                except PeerClosedError:
                    front.is_gone = True

    def beat_again(self) -> None:
        with self.lock:
            for front in self._by_name.values():
                with contextlib.suppress(PeerClosedError):  # the loop meets the same error
                    front.channel.beat_again()
