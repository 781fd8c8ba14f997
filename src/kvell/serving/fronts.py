"""The fronts of an instance: a connection to each, and which of them an event is for."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import (
    FRONT_LEASE_SECONDS,
    Command,
    Event,
    Finished,
    Heartbeat,
    MigrationRefused,
    Ready,
    Tokens,
)
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.serving.channel import Channel, PeerClosed
from kvell.vocabulary import RequestId
from kvell.wire.frames import ProtocolError

UNREAD_SECONDS = 2.0
"""A front that holds up the others for so long is hung up on."""
FORGIVEN = 0.25
"""Seconds of that time that are forgiven in each second in which it holds up nobody."""
LOOK_SECONDS = 1.0
"""Most seconds that count between two looks: an instance that was stopped itself does not take that
for the fault of a front."""
OF_A_REQUEST = PromptLogprobs | Tokens | Finished | MigrationRefused


@dataclass(frozen=True)
class Arrival:
    """A front that has come in.

    :param incarnation: of two connections of one front, that of the higher one is newer.
    :param is_alone: whether nobody else waits for it, and its process ends with the connection.
    """

    front: str
    sock: socket.socket
    incarnation: int = 0
    is_alone: bool = False


class ConnectedFront:
    """A front that is connected.

    Its lease is over when it is silent for ``FRONT_LEASE_SECONDS``, or has held up the others for
    ``UNREAD_SECONDS``: more bytes waited for it than should.  That time adds up, and is forgiven at
    a quarter of its speed, so that a front that reads a little whenever the others have waited for
    long cannot go on like that.  A front that is alone has no lease.

    :ivar watches: whether it is told what is cached.
    :ivar problem: what it said that is not the protocol.
    """

    def __init__(self, arrival: Arrival, channel: Channel, now_seconds: float) -> None:
        self.name, self.sock = arrival.front, arrival.sock
        self.incarnation = arrival.incarnation
        self.channel = channel
        self.watches = False
        self.problem: ProtocolError | None = None
        self._is_alone = arrival.is_alone
        self._is_gone = False
        self._heard_seconds = self._looked_seconds = now_seconds
        self._holds_up, self._held_up_seconds = False, 0.0

    def send(self, events: Iterable[Event]) -> None:
        """Send, unless the connection has ended."""
        self._attempt(lambda: self.channel.queue(events))

    def flush(self) -> None:
        """Send what waits."""
        self._attempt(self.channel.flush)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat, unless the connection has ended."""
        self._attempt(lambda: self.channel.beat(heartbeat))

    def receive(self, now_seconds: float) -> list[Command]:
        """Return the commands that have come; none once the connection has ended."""
        self._heard_seconds = now_seconds
        try:
            commands = self.channel.receive()
        except ProtocolError as problem:  # of it alone: the others go on
            self.problem, self._is_gone = problem, True
            return []
        except (PeerClosed, OSError):
            self._is_gone = True
            return []
        self.watches |= any(isinstance(one, WatchIndex) for one in commands)
        return commands

    def interest(self) -> int:
        """Return what its socket is waited for; a connection that is full is not read."""
        self._holds_up = self.channel.full
        reading = 0 if self._holds_up else selectors.EVENT_READ
        interest = reading | (selectors.EVENT_WRITE if self.channel.pending else 0)
        return interest or selectors.EVENT_WRITE

    def is_over(self, now_seconds: float) -> bool:
        """Look, after each wait, whether its connection has ended, or its lease is over."""
        since_look_seconds = min(LOOK_SECONDS, now_seconds - self._looked_seconds)
        self._looked_seconds = now_seconds
        if self._holds_up:
            self._held_up_seconds += since_look_seconds
        else:
            forgiven_seconds = FORGIVEN * since_look_seconds
            self._held_up_seconds = max(0.0, self._held_up_seconds - forgiven_seconds)
        if self._is_gone or self._is_alone:
            return self._is_gone
        is_silent = now_seconds - self._heard_seconds > FRONT_LEASE_SECONDS
        return is_silent or self._held_up_seconds > UNREAD_SECONDS

    def _attempt(self, send: Callable[[], None]) -> None:
        try:
            send()
        except (PeerClosed, OSError):
            self._is_gone = True


class Fronts:
    """All connected fronts; the loop's thread changes them, the heart's thread only sends.

    :param others: what all fronts but one have (:meth:`.CommandGate.others`).
    :param owner: names the front of a request.
    """

    def __init__(
        self,
        outgoing_limit_bytes: int,
        others: Callable[[str], tuple[int, int]],
        owner: Callable[[RequestId], str],
    ) -> None:
        self.lock = threading.RLock()
        """Whoever holds it is alone with the connections."""
        self._limit_bytes, self._others, self._owner = outgoing_limit_bytes, others, owner
        self._by_name: dict[str, ConnectedFront] = {}

    def __iter__(self) -> Iterator[ConnectedFront]:
        return iter(list(self._by_name.values()))

    def front_named(self, name: str) -> ConnectedFront | None:
        """Return the front of this name, if it is connected."""
        return self._by_name.get(name)

    @property
    def pending(self) -> bool:
        """Whether bytes wait for any of them."""
        return any(one.channel.pending for one in self._by_name.values())

    @property
    def full(self) -> bool:
        """Whether more bytes than should wait for one of them."""
        return any(one.channel.full for one in self._by_name.values())

    def add(self, arrival: Arrival, ready: Ready, now_seconds: float) -> ConnectedFront:
        """Take a front in; it is told at once what the instance serves."""
        channel = Channel(arrival.sock, self._limit_bytes)
        front = ConnectedFront(arrival, channel, now_seconds)
        with self.lock:
            self._by_name[front.name] = front
            front.send([ready])
        return front

    def remove(self, front: ConnectedFront) -> None:
        """Hang up on a front."""
        with self.lock:
            del self._by_name[front.name]
            with contextlib.suppress(OSError):
                front.sock.shutdown(socket.SHUT_RDWR)
            front.sock.close()

    def tell(self, events: Iterable[Event], asked: str | None) -> list[RequestId]:
        """Send each event to the fronts that it is for.

        :param asked: the front whose command they answer, if they answer one.
        :returns: requests of fronts that are not here.
        """
        told: dict[str, list[Event]] = {}
        strays: list[RequestId] = []
        for event in events:
            if isinstance(event, OF_A_REQUEST):
                name = self._owner(event.request_id)
                if name not in self._by_name and asked is not None:
                    name = asked  # its refusal: the id has not its front's name
                if name in self._by_name:
                    told.setdefault(name, []).append(event)
                elif not isinstance(event, Finished):
                    strays.append(event.request_id)
                continue
            if isinstance(event, IndexNotice):
                names = [one.name for one in self._by_name.values() if one.watches]
            else:
                names = [asked] if asked is not None else list(self._by_name)
            for name in names:
                told.setdefault(name, []).append(event)
        for name, sent in told.items():
            if name in self._by_name:
                self._by_name[name].send(sent)
        return strays

    def beat(self, beat: Heartbeat) -> None:
        """See :class:`.Listeners`; each is told what the others have."""
        with self.lock:
            for front in self._by_name.values():
                tokens, requests = self._others(front.name)
                own = replace(beat, others_prompt_tokens=tokens, others_requests=requests)
                front.heartbeat(own)

    def beat_again(self) -> None:
        """See :class:`.Listeners`."""
        with self.lock:
            for front in self._by_name.values():
                with contextlib.suppress(PeerClosed, OSError):  # the loop meets the same
                    front.channel.beat_again()
