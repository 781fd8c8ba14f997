"""The fronts of an instance: a connection to each, and which of them an event is for."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import (
    FRONT_LEASE_SECONDS,
    Command,
    Event,
    Finished,
    Heartbeat,
    Ready,
    Stays,
    Tokens,
)
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.serving.channel import Channel, PeerClosed
from kvell.serving.gate import front_of
from kvell.vocabulary import RequestId
from kvell.wire.frames import ProtocolError

UNREAD_SECONDS = 2.0
"""A front that leaves more unread than it should for so long is hung up on: others wait for it."""
OF_A_REQUEST = PromptLogprobs | Tokens | Finished | Stays


@dataclass
class ConnectedFront:
    """A front that is connected.

    :ivar heard_seconds: when it last said something.
    :ivar watches: whether it is told what is cached.
    :ivar unread_since_seconds: since when more waits for it than should; None: not now.
    :ivar is_gone: whether its connection has ended, as sending has shown.
    """

    name: str
    sock: socket.socket
    channel: Channel
    heard_seconds: float
    watches: bool = False
    unread_since_seconds: float | None = field(default=None)
    is_gone: bool = False

    def send(self, events: Iterable[Event]) -> None:
        """Send, unless it has gone."""
        try:
            self.channel.queue(events)
        except (PeerClosed, OSError):
            self.is_gone = True

    def receive(self, now_seconds: float) -> list[Command]:
        """What it says; nothing once it has gone."""
        self.heard_seconds = now_seconds
        try:
            commands = self.channel.receive()
        except (PeerClosed, ProtocolError, OSError):  # of it alone: the others go on
            self.is_gone = True
            return []
        self.watches |= any(isinstance(one, WatchIndex) for one in commands)
        return commands

    def flush(self) -> None:
        """Send what waits."""
        try:
            self.channel.flush()
        except (PeerClosed, OSError):
            self.is_gone = True

    def is_over(self, now_seconds: float) -> bool:
        """Whether it has gone, is silent for longer than its lease, or does not read."""
        if not self.channel.full:
            self.unread_since_seconds = None
        elif self.unread_since_seconds is None:
            self.unread_since_seconds = now_seconds
        unread_since = self.unread_since_seconds
        does_not_read = unread_since is not None and now_seconds - unread_since > UNREAD_SECONDS
        return (
            self.is_gone or does_not_read or now_seconds - self.heard_seconds > FRONT_LEASE_SECONDS
        )


class Fronts:
    """Those that are connected; the loop's thread changes them, the heart's only sends beats.

    :param others: what all fronts but one have (:meth:`.CommandGate.others`).
    """

    def __init__(self, outgoing_limit_bytes: int, others: Callable[[str], tuple[int, int]]) -> None:
        self.lock = threading.RLock()
        """Whoever holds it is alone with the connections."""
        self._limit_bytes, self._others = outgoing_limit_bytes, others
        self._by_name: dict[str, ConnectedFront] = {}

    def __iter__(self) -> Iterator[ConnectedFront]:
        return iter(list(self._by_name.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def pending(self) -> bool:
        """Whether bytes wait for any of them."""
        return any(one.channel.pending for one in self._by_name.values())

    @property
    def full(self) -> bool:
        """Whether more bytes than should wait for one of them."""
        return any(one.channel.full for one in self._by_name.values())

    def add(
        self, name: str, sock: socket.socket, ready: Ready, now_seconds: float
    ) -> ConnectedFront:
        """Take a front in; it is told at once what the instance serves."""
        front = ConnectedFront(name, sock, Channel(sock, self._limit_bytes), now_seconds)
        with self.lock:
            self._by_name[name] = front
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
        """Send each event to whom it is for.

        :param asked: the front whose command they answer, if they answer one.
        :returns: requests of fronts that are not here.
        """
        told: dict[str, list[Event]] = {}
        strays: list[RequestId] = []
        for event in events:
            if isinstance(event, OF_A_REQUEST):
                name = front_of(event.request_id)
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
                try:
                    front.channel.beat(own)
                except (PeerClosed, OSError):
                    front.is_gone = True

    def beat_again(self) -> None:
        """See :class:`.Listeners`."""
        with self.lock:
            for front in self._by_name.values():
                with contextlib.suppress(PeerClosed, OSError):  # the loop meets the same
                    front.channel.beat_again()
