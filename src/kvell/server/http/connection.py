"""One HTTP connection: uvicorn's, with bounds of time and memory."""

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, get_args

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.api.http_errors import ApiError
from kvell.server.logs.lines import tell
from kvell.server.logs.seldom import SeldomLine
from kvell.server.metrics.front_metrics import ServerMetrics


class UnreadWatch:
    """A watch that calls back if a client reads too few bytes in an interval.

    :param seconds: interval between two checks.
    :param fewest_bytes: bytes that the client must read in an interval.
    :param stalled: called once, when the client has read less.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        seconds: float,
        fewest_bytes: float,
        stalled: Callable[[], None],
    ) -> None:
        self._loop, self._transport = loop, transport
        self._seconds, self._fewest_bytes, self._stalled = seconds, fewest_bytes, stalled
        self._unread_bytes = 0
        self._due: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._due is None:
            self._unread_bytes = self._count_unread()
            self._due = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _look(self) -> None:
        self._due = None
        if self._unread_bytes - self._count_unread() < self._fewest_bytes:
            self._stalled()
        else:
            self.begin()

    def _count_unread(self) -> int:
        """Return the bytes that the client has not acknowledged, here and in the system's buffer.

        The system's buffer accepts more only when a third of it is free, which can be megabytes.
        So the bytes here alone do not distinguish a slow reader from one that does not read.
        """
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):  # without support, its buffer counts as read
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + queued[0]


Phase = Literal["arriving", "idle", "body", "answer"]
"""The next event of a connection: its transport, a request's head, a request's body, its answer."""
WAITING: tuple[Phase, ...] = ("idle", "body")
"""Phases in which a connection may be dropped, in the order of dropping."""

Connection = TypeVar("Connection")


class OpenConnections(Generic[Connection]):
    """Open connections by phase, in the order in which they entered the phase.

    When there is no room, the connection that has waited longest is dropped.  So a client that
    opens connections, and sends nothing or an endless request, displaces its own connections.

    ::

        arriving ──► idle ──head──► body ──complete──► answer
                      ▲ │             │                  │
                      │ └── dropped ──┘                  │
                      └──────────── answered ────────────┘
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._phases: dict[Connection, Phase] = {}
        self._by_phase: Mapping[Phase, dict[Connection, None]] = MappingProxyType(
            {phase: {} for phase in get_args(Phase)}
        )

    def __len__(self) -> int:
        return len(self._phases)

    def count(self, phase: Phase) -> int:
        return len(self._by_phase[phase])

    def enter(self, connection: Connection, phase: Phase) -> None:
        """Add a connection, or move it to a phase.

        A connection that is in this phase already keeps its place in the order.
        """
        before = self._phases.get(connection)
        if before == phase:
            return
        if before is not None:
            del self._by_phase[before][connection]
        self._phases[connection] = phase
        self._by_phase[phase][connection] = None

    def on_closed(self, connection: Connection) -> None:
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._by_phase[phase][connection]

    def longest_waiting(self) -> Connection | None:
        """Return the connection to drop when there is no room; None if none may be dropped."""
        for phase in WAITING:
            for connection in self._by_phase[phase]:
                return connection
        return None


BAD_REQUEST = ApiError(400, "this is not a valid HTTP request", "invalid_request_error")
TOO_SLOW = ApiError(408, "the head of the request did not arrive in time", "timeout_error")
FULL = ApiError(503, "too many connections; retry in a moment", "service_unavailable_error")


def raw_answer(error: ApiError) -> bytes:
    """Return the bytes of an answer after which the connection is closed."""
    response = error.response()
    response.headers["connection"] = "close"
    fields = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
    phrase = HTTPStatus(error.status).phrase.encode()
    status = b"HTTP/1.1 %d %b\r\n" % (error.status, phrase)
    return status + fields + b"\r\n" + bytes(response.body)


READ_AT_ONCE_BYTES = 16 << 10
"""The size of a read: the most bytes parsed in one iteration of the event loop, and the most bytes
buffered after a request that is being answered.  ``h11`` bounds an unfinished head to as much."""


@dataclass(frozen=True)
class Face:
    """The state that all connections of a server share."""

    bounds: HttpBounds
    connections: "OpenConnections[BoundedConnection]"
    metrics: ServerMetrics


class BoundedConnection(H11Protocol):
    """A connection that ends when its client is too slow.

    No code of this class runs for each piece of an answer: the client's reading is only watched
    while the transport's write buffer is above its high-water mark.
    """

    def __init__(
        self, face: Face, config: uvicorn.Config, server: ServerState, state: dict[str, Any]
    ) -> None:
        super().__init__(config, server, state)
        self._face = face
        self.timeout_keep_alive = face.bounds.keep_alive_seconds
        self._awaited: Phase = "idle"
        self._has_begun = False
        self._request_due: asyncio.TimerHandle | None = None
        self._unread: UnreadWatch | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        # The size of the buffer that asyncio's transports read into.
        setattr(transport, "max_size", READ_AT_ONCE_BYTES)  # noqa: B010 - not in its interface
        self._face.connections.enter(self, "idle")
        self._await_request(self._face.bounds.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and stop its timers."""
        self._face.connections.on_closed(self)
        self._stop_request_timer()
        if self._unread is not None:
            self._unread.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and update the connection's phase and timer."""
        if self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return  # sent after the last request; h11 would report it as an error of the answer
        super().data_received(data)
        self._note_awaited()
        if self._awaited == "idle":
            self._has_begun = True
            if self._request_due is None:
                self._await_request(self._face.bounds.head_seconds)

    def on_response_complete(self) -> None:
        """Wait for the next request's head, or for the end of the connection."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_last_read()
            return
        self._note_awaited()
        if self._awaited == "body":  # refused unread; closing now could lose the client's answer
            self._await_request(self._face.bounds.body_seconds)

    def pause_writing(self) -> None:
        """Begin to watch how much the client reads."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """Stop the watch: the client has read enough."""
        super().resume_writing()
        if self._unread is not None and not self.transport.is_closing():
            self._unread.end()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        super().timeout_keep_alive_handler()
        self._await_last_read()

    def shutdown(self) -> None:
        """Close the connection, after the answer if one is in progress."""
        super().shutdown()
        self._await_last_read()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._refuse(BAD_REQUEST)

    def drop(self) -> None:
        """Abort the connection to make room for another."""
        self._face.metrics.on_rejected("connections")
        self._end()

    def _note_awaited(self) -> None:
        if self.transport.is_closing():
            return
        before, state = self._awaited, self.conn.their_state
        phase: Phase = "idle" if state is h11.IDLE else "answer"
        if state is h11.SEND_BODY:
            phase = "body"
        self._awaited = phase
        if phase == "idle" and self.transport.get_write_buffer_size():
            phase = "answer"  # dropping the connection would lose the transport's buffer
        self._face.connections.enter(self, phase)
        if self._awaited != before:
            self._has_begun = False
            self._stop_request_timer()

    def _await_request(self, seconds: float) -> None:
        self._request_due = self.loop.call_later(seconds, self._on_request_due)

    def _on_request_due(self) -> None:
        self._request_due = None
        if self._awaited == "idle" and self._has_begun:
            self._face.metrics.on_rejected("slow_client")
            self._refuse(TOO_SLOW)
        else:
            self._end()  # there is no request, or it was answered

    def _await_last_read(self) -> None:
        """Bound the time in which the client of a closing connection reads the rest."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_reading()

    def _watch_reading(self) -> None:
        """Begin to watch how much the client reads, unless that is watched already."""
        if self._unread is None:
            bounds = self._face.bounds
            fewest_bytes = bounds.read_bytes_per_second * bounds.unread_seconds
            self._unread = UnreadWatch(
                self.loop, self.transport, bounds.unread_seconds, fewest_bytes, self._on_stalled
            )
        self._unread.begin()

    def _on_stalled(self) -> None:
        self._face.metrics.on_rejected("slow_client")
        self._end()

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete request, unless an answer has begun; then close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._end()
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.cycle is not None:
            self.cycle.disconnected = True  # the app must not answer a second time
            self.cycle.message_event.set()
        self._face.metrics.answered_over_http("", error.status)
        self.transport.write(raw_answer(error))
        self.transport.close()
        self._await_last_read()

    def _end(self) -> None:
        self._face.connections.on_closed(self)
        self.transport.abort()

    def _stop_request_timer(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None


logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""The most connections per iteration of the event loop, which closes dropped sockets later."""
PAUSE_SECONDS = 0.2


class Acceptor:
    """An acceptor for uvicorn that replaces ``asyncio.Server``.

    ``asyncio.Server`` accepts a whole backlog before the first protocol is called.  When
    descriptors run out, it logs a traceback for each place of the backlog every second.

    :param make: factory of connections that have no transport yet.
    """

    def __init__(
        self, listener: socket.socket, face: Face, make: Callable[[], BoundedConnection]
    ) -> None:
        self._listener, self._face, self._make = listener, face, make
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[object]] = set()
        self._resumes: asyncio.TimerHandle | None = None
        self._full, self._failed = SeldomLine(), SeldomLine()
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        if self._resumes is not None:
            self._resumes.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return immediately: uvicorn awaits the connections separately."""

    def _begin(self) -> None:
        self._resumes = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connections = self._face.connections
        if len(connections) >= connections.most and not self._make_room():
            self._face.metrics.on_rejected("connections")
            _refuse(accepted)
            return
        connection = self._make()
        connections.enter(connection, "arriving")
        arriving: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, accepted)
        )
        self._arriving.add(arriving)
        arriving.add_done_callback(partial(self._arrived, connection))

    def _arrived(self, connection: BoundedConnection, arriving: asyncio.Task[object]) -> None:
        self._arriving.discard(arriving)
        if arriving.cancelled() or arriving.exception() is not None:
            self._face.connections.on_closed(connection)  # the client has closed it already

    def _make_room(self) -> bool:
        """Drop the connection that has waited longest; return whether there is one."""
        untold = self._full.untold_if_due()
        if untold is not None:
            most = self._face.connections.most
            tell(logger, logging.WARNING, "connections_full", open=most, untold=untold)
        return self._drop_one()

    def _drop_one(self) -> bool:
        dropped = self._face.connections.longest_waiting()
        if dropped is not None:
            dropped.drop()
        return dropped is not None

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listener)
        self._resumes = self._loop.call_later(PAUSE_SECONDS, self._begin)
        for _ in range(ACCEPTED_AT_ONCE):
            self._drop_one()
        untold = self._failed.untold_if_due()
        if untold is not None:
            problem = os.strerror(error.errno) if error.errno else str(error)
            tell(logger, logging.ERROR, "accept_failed", problem=problem, untold=untold)


def _refuse(accepted: socket.socket) -> None:
    """Answer a client with 503; a reset may discard it if the client has sent data already."""
    with accepted, contextlib.suppress(OSError):
        accepted.send(raw_answer(FULL))
