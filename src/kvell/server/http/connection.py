"""One HTTP connection: uvicorn's, with bounds of time and memory."""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvell.errors import Bound
from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.api.http_errors import ApiError
from kvell.server.http.open_connections import OpenConnections, Phase
from kvell.server.http.raw_answers import BAD_REQUEST, TOO_SLOW, raw_answer
from kvell.server.http.unread import UnreadWatch

READ_AT_ONCE_BYTES = 16 << 10
"""The size of a read: the most bytes parsed in one iteration of the event loop, and the most bytes
buffered after a request that is being answered.  ``h11`` bounds an unfinished head to as much."""


class FaceObserver(Protocol):
    """An observer of connections and requests that do not reach the app (``ServerMetrics``)."""

    def on_rejected(self, bound: Bound) -> None:
        """Count a connection or a request that exceeded a bound."""

    def answered_over_http(self, path: str, status: int) -> None:
        """Count an answer that the app did not send."""


@dataclass(frozen=True)
class Face:
    """The state that all connections of a server share."""

    bounds: HttpBounds
    connections: "OpenConnections[BoundedConnection]"
    observer: FaceObserver


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
        self._unread: UnreadWatch

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        # The size of the buffer that asyncio's transports read into.
        setattr(transport, "max_size", READ_AT_ONCE_BYTES)  # noqa: B010 - not in its interface
        bounds = self._face.bounds
        fewest_bytes = bounds.read_bytes_per_second * bounds.unread_seconds
        self._unread = UnreadWatch(
            self.loop, transport, bounds.unread_seconds, fewest_bytes, self._on_stalled
        )
        self._face.connections.enter(self, "idle")
        self._await_request(bounds.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and stop its timers."""
        self._face.connections.on_closed(self)
        self._stop_request_timer()
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
        self._unread.begin()

    def resume_writing(self) -> None:
        """Stop the watch: the client has read enough."""
        super().resume_writing()
        if not self.transport.is_closing():
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
        self._face.observer.on_rejected("connections")
        self._end()

    def _note_awaited(self) -> None:
        if self.transport.is_closing():
            return
        before, self._awaited = self._awaited, _awaited(self.conn.their_state)
        phase = self._awaited
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
            self._face.observer.on_rejected("slow_client")
            self._refuse(TOO_SLOW)
        else:
            self._end()  # there is no request, or it was answered

    def _await_last_read(self) -> None:
        """Bound the time in which the client of a closing connection reads the rest."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._unread.begin()

    def _on_stalled(self) -> None:
        self._face.observer.on_rejected("slow_client")
        self._end()

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete request, unless an answer has begun; then close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._end()
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.cycle is not None:
            self.cycle.disconnected = True  # the app must not answer a second time
            self.cycle.message_event.set()
        self._face.observer.answered_over_http("", error.status)
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


def _awaited(their_state: type[object]) -> Phase:
    if their_state is h11.IDLE:
        return "idle"
    return "body" if their_state is h11.SEND_BODY else "answer"
