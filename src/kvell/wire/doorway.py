"""Where others come in: one listener, one thread, and nobody who keeps the others out.

::

    accepted ──► stranger ──proved who it is──► handed over by purpose
                    │ the time is up, it breaks the protocol, it does not know the secret
                    └─ it is the oldest of its address, and there are too many ──► hung up on

All strangers are heard at once, in a selector, so a silent one costs a descriptor and nothing
else.  Their time counts from the moment when they were accepted.  Who comes when there are as many
strangers as may be takes the place of the oldest of the address that has most: an honest peer needs
a few milliseconds, and strangers cannot lock it out by staying, or by coming again and again.
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
from kvell.wire.session import Answering, OtherReleaseError, Purpose

MOST_STRANGERS = 64
"""Connections that have not proved who they are."""
PAUSE_SECONDS = 0.1
"""Before the next try, when the system has no descriptor for somebody who wants to come in."""
BACKLOG_TURN = 16
"""Connections that are accepted before the strangers are looked at again."""

logger = logging.getLogger(__name__)

Enters = Callable[[Greeting, socket.socket], None]
"""Gets who it is and the connection, on the doorway's thread, which it must not hold up.  When it
raises :class:`ProtocolError` or OSError the connection is closed."""


class Doorway:
    """Lets in who knows the cluster's secret, from :meth:`open` to :meth:`close`.

    :param listener: a socket that listens; it is closed with the doorway.
    :param told: who this is.
    :param secret: of the cluster.
    :param enters: whom a connection is handed to, by its purpose; other purposes are refused.
    :param most_strangers: heard at once.
    :param greeting_seconds: from accepting a connection to its proof.
    :ivar address: at which it listens.
    """

    def __init__(
        self,
        listener: socket.socket,
        told: Greeting,
        secret: bytes,
        enters: Mapping[Purpose, Enters],
        *,
        most_strangers: int = MOST_STRANGERS,
        greeting_seconds: float = GREETING_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._listener, self._told, self._secret, self._enters = listener, told, secret, enters
        self._most_strangers, self._greeting_seconds = most_strangers, greeting_seconds
        self._clock = clock or MonotonicClock()
        self.address: Endpoint = endpoint_of(listener)
        self._strangers: dict[socket.socket, _Stranger] = {}
        """The oldest first."""
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell.descriptor, selectors.EVENT_READ)
        listener.setblocking(False)
        self._listens_at = 0.0
        self._is_short, self._is_closing = False, False
        self._thread = threading.Thread(target=self._run, name="kvell-doorway", daemon=True)

    @property
    def strangers(self) -> int:
        """Connections that have not proved yet who they are."""
        return len(self._strangers)

    def open(self) -> None:
        """Begin to let others in."""
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more, and hang up on strangers; idempotent."""
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

    # ------------------------------------------------------------------ the thread's own

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
        """Look for newcomers, unless a pause is due."""
        is_registered = self._listener in self._selector.get_map()
        if now >= self._listens_at and not is_registered:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif now < self._listens_at and is_registered:
            self._selector.unregister(self._listener)

    def _pause_seconds(self, now: float) -> float | None:
        """How long nothing is due; None: until somebody comes."""
        due = [one.deadline for one in self._strangers.values()][:1]
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
                continue  # it hung up before
            except OSError as error:  # no descriptor, no memory: trying at once changes nothing
                self._listens_at = self._clock.now_seconds() + PAUSE_SECONDS
                if not self._is_short:
                    logger.warning("nobody can come in at %s just now: %s", self.address, error)
                self._is_short = True
                return
            self._is_short = False
            while len(self._strangers) >= self._most_strangers:
                self._drop(self._oldest_of_most())
            self._welcome(sock, where[0] if isinstance(where, tuple) else "")

    def _oldest_of_most(self) -> "_Stranger":
        """The oldest stranger of the address that has most."""
        counts = Counter(one.host for one in self._strangers.values())
        most = max(counts.values())
        return next(one for one in self._strangers.values() if counts[one.host] == most)

    def _welcome(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            keep(sock)
        deadline = self._clock.now_seconds() + self._greeting_seconds
        answering = Answering(self._told, self._secret, self._enters)
        stranger = _Stranger(sock, host, answering, deadline)
        self._strangers[sock] = stranger
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: "_Stranger", mask: int) -> None:
        if stranger.sock not in self._strangers:
            return  # it made way in this very turn
        try:
            stranger.serve(mask)
            met = stranger.met
            if met is None:
                self._selector.modify(stranger.sock, stranger.interest, stranger)
                return
            self._forget(stranger)
            purpose, heard = met
            self._enters[purpose](heard, stranger.sock)
        except (OSError, ProtocolError) as error:
            logger.debug("a stranger at %s was hung up on: %s", self.address, error)
            if isinstance(error, OtherReleaseError):  # it is told why, if it takes that at once
                with contextlib.suppress(OSError):
                    stranger.sock.send(error.answer)
            self._drop(stranger)
        except Exception:
            # A fault of ours, which one stranger has found: nobody else shall be kept out by it.
            told = "a fault of ours ended the connection with a stranger at %s"
            logger.exception(told, self.address)
            self._drop(stranger)

    def _drop_late(self) -> None:
        now = self._clock.now_seconds()
        for stranger in list(self._strangers.values()):
            if stranger.deadline > now:
                return
            self._drop(stranger)

    def _drop(self, stranger: "_Stranger") -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):  # it has ended
            stranger.sock.shutdown(socket.SHUT_RDWR)
        stranger.sock.close()

    def _forget(self, stranger: "_Stranger") -> None:
        if self._strangers.pop(stranger.sock, None) is not None:
            self._selector.unregister(stranger.sock)


class _Stranger:
    """Somebody who has not proved yet who it is.

    :ivar host: address that it came from; "" on this machine.
    :ivar deadline: when it is hung up on, by the doorway's clock.
    """

    def __init__(
        self, sock: socket.socket, host: str, answering: Answering, deadline: float
    ) -> None:
        self.sock, self.host, self.deadline = sock, host, deadline
        self._answering, self._outgoing = answering, b""

    @property
    def met(self) -> tuple[Purpose, Greeting] | None:
        """What it wants and who it is, once it has also been answered."""
        return None if self._outgoing else self._answering.met

    @property
    def interest(self) -> int:
        """What its socket is waited for."""
        return selectors.EVENT_WRITE if self._outgoing else selectors.EVENT_READ

    def serve(self, mask: int) -> None:
        """Read or write what can be.

        :raises ProtocolError: when it is nobody who may come in.
        :raises OSError: when it hung up.
        """
        with contextlib.suppress(BlockingIOError):
            if mask & selectors.EVENT_READ and not self._outgoing:
                data = self.sock.recv(GREETING_BYTES)
                if not data:
                    raise ProtocolError("it hung up before it said who it is")
                self._outgoing += self._answering.hear(data)
            if self._outgoing:
                self._outgoing = self._outgoing[self.sock.send(self._outgoing) :]
