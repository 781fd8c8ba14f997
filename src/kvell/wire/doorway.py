"""Accept and authenticate connections on one thread. A slow or hostile peer cannot block others.

::

    accepted ──► stranger ──authenticated──► handed over by purpose
                    │ timeout, protocol violation, wrong secret
                    └─ too many strangers, and it is the oldest of the busiest address ──► closed

A stranger is a connection that is not authenticated yet. One selector serves all strangers, so a
silent stranger costs only a descriptor. Its time counts from its acceptance. At the limit, a new
connection replaces the oldest stranger of the address that has the most strangers. An honest peer
needs only a few milliseconds, so strangers cannot lock it out by staying or reconnecting.
"""

import contextlib
import logging
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from kvell.clock import Clock, MonotonicClock
from kvell.wire.bell import Bell
from kvell.wire.endpoints import Endpoint, endpoint_of, keep
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import GREETING_BYTES, GREETING_SECONDS, Greeting
from kvell.wire.session import OtherReleaseError, Purpose, ServerHandshake

MOST_STRANGERS = 64
"""The largest number of connections that are not authenticated yet."""
PAUSE_SECONDS = 0.1
"""The pause before the next accept when the system has no free descriptor."""
BACKLOG_TURN = 16
"""The largest number of connections accepted before strangers are served again."""

logger = logging.getLogger(__name__)

Enters = Callable[[Greeting, socket.socket], None]
"""A handler of authenticated connections. It runs on the thread of ``Doorway`` and must not block.
When it raises :class:`ProtocolError` or OSError, ``Doorway`` closes the connection."""


class Doorway:
    """A listener that authenticates peers with the cluster's secret.

    :param enters: the handler of each purpose. Other purposes are refused.
    :param greeting_seconds: the time that a peer has to authenticate after it is accepted.
    """

    def __init__(
        self,
        listener: socket.socket,
        greeting: Greeting,
        secret: bytes,
        enters: Mapping[Purpose, Enters],
        *,
        most_strangers: int = MOST_STRANGERS,
        greeting_seconds: float = GREETING_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._listener, self._told, self._secret, self._enters = listener, greeting, secret, enters
        self._most_strangers, self._greeting_seconds = most_strangers, greeting_seconds
        self._clock = clock or MonotonicClock()
        self.address: Endpoint = endpoint_of(listener)
        self._strangers: dict[socket.socket, _Stranger] = {}
        """Oldest first."""
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell.descriptor, selectors.EVENT_READ)
        listener.setblocking(False)
        self._listens_at = 0.0
        self._is_short, self._is_closing = False, False
        self._thread = threading.Thread(target=self._run, name="kvell-doorway", daemon=True)

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and close the connections of strangers. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._bell.ring()
        if self._thread.ident is not None:
            self._thread.join()
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._listener.close()
        self._selector.close()
        self._bell.close()

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while not self._is_closing:
            now = self._clock.now_seconds()
            self._listen(now)
            for key, mask in self._selector.select(self._pause_seconds(now)):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Stranger):
                    self._hear(key.data, mask)
            self._drop_late()

    def _listen(self, now: float) -> None:
        is_registered = self._listener in self._selector.get_map()
        if now >= self._listens_at and not is_registered:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif now < self._listens_at and is_registered:
            self._selector.unregister(self._listener)

    def _pause_seconds(self, now: float) -> float | None:
        """Return the time until the next deadline, or None if there is none."""
        due = [stranger.deadline for stranger in self._strangers.values()][:1]
        if self._listens_at > now:
            due.append(self._listens_at)
        return max(0.0, min(due) - now) if due else None

    def _accept(self) -> None:
        for _ in range(BACKLOG_TURN):
            try:
                sock, where = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the peer closed the connection before it was accepted
            except OSError as error:  # no descriptor or memory: an immediate retry cannot help
                self._listens_at = self._clock.now_seconds() + PAUSE_SECONDS
                if not self._is_short:
                    logger.warning("cannot accept connections at %s: %s", self.address, error)
                self._is_short = True
                return
            self._is_short = False
            while len(self._strangers) >= self._most_strangers:
                self._drop(self._oldest_of_most())
            self._welcome(sock, where[0] if isinstance(where, tuple) else "")

    def _oldest_of_most(self) -> "_Stranger":
        counts = Counter(stranger.host for stranger in self._strangers.values())
        most = max(counts.values())
        return next(
            stranger for stranger in self._strangers.values() if counts[stranger.host] == most
        )

    def _welcome(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            keep(sock)
        deadline = self._clock.now_seconds() + self._greeting_seconds
        answering = ServerHandshake(self._told, self._secret, self._enters)
        stranger = _Stranger(sock, host, answering, deadline)
        self._strangers[sock] = stranger
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: "_Stranger", mask: int) -> None:
        if stranger.sock not in self._strangers:
            return  # a new connection replaced it in this turn
        try:
            stranger.serve(mask)
            met = stranger.met
            if met is None:
                self._selector.modify(stranger.sock, stranger.interest, stranger)
                return
            self._forget(stranger)
            purpose, greeting = met
            self._enters[purpose](greeting, stranger.sock)
        except (OSError, ProtocolError) as error:
            logger.debug("closed an unauthenticated connection at %s: %s", self.address, error)
            if isinstance(error, OtherReleaseError):  # send the reason, if it fits
                with contextlib.suppress(OSError):
                    stranger.sock.send(error.answer)
            self._drop(stranger)
        except Exception:
            # An error in this process, triggered by one stranger, must not affect other peers.
            text = "internal error in the handshake at %s"
            logger.exception(text, self.address)
            self._drop(stranger)

    def _drop_late(self) -> None:
        now = self._clock.now_seconds()
        for stranger in list(self._strangers.values()):
            if stranger.deadline > now:
                return
            self._drop(stranger)

    def _drop(self, stranger: "_Stranger") -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):  # it is closed already
            stranger.sock.shutdown(socket.SHUT_RDWR)
        stranger.sock.close()

    def _forget(self, stranger: "_Stranger") -> None:
        if self._strangers.pop(stranger.sock, None) is not None:
            self._selector.unregister(stranger.sock)


class _Stranger:
    """A connection that is not authenticated yet.

    :ivar host: the peer's address, or "" for this host.
    :ivar deadline: when ``Doorway`` closes it, in seconds of the clock of ``Doorway``.
    """

    def __init__(
        self, sock: socket.socket, host: str, answering: ServerHandshake, deadline: float
    ) -> None:
        self.sock, self.host, self.deadline = sock, host, deadline
        self._answering = answering
        self._outgoing = b""

    @property
    def met(self) -> tuple[Purpose, Greeting] | None:
        return None if self._outgoing else self._answering.met

    @property
    def interest(self) -> int:
        return selectors.EVENT_WRITE if self._outgoing else selectors.EVENT_READ

    def serve(self, mask: int) -> None:
        """Read or write the available bytes.

        :raises ProtocolError: when the peer fails to authenticate, or hangs up.
        :raises OSError: when the connection fails.
        """
        with contextlib.suppress(BlockingIOError):
            if mask & selectors.EVENT_READ and not self._outgoing:
                data = self.sock.recv(GREETING_BYTES)
                if not data:
                    raise ProtocolError("the peer closed the connection before it authenticated")
                self._outgoing += self._answering.hear(data)
            if self._outgoing:
                self._outgoing = self._outgoing[self.sock.send(self._outgoing) :]
