"""One connection of the HTTP face: uvicorn's, with bounds of its time and its memory."""

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
"""Besides what is left of an unfinished head (``h11`` bounds it, to as much again), all that is
parsed in one turn of the loop, and all that piles up behind a request that is being answered."""


class FaceObserver(Protocol):
    """Counts what no app sees; ``ServerMetrics`` does."""

    def rejected(self, bound: Bound) -> None:
        """A connection or a request exceeded a bound."""

    def answered_over_http(self, path: str, status: int) -> None:
        """A request was answered before its path was known."""


@dataclass(frozen=True)
class Face:
    """What all connections of a server share."""

    bounds: HttpBounds
    connections: "OpenConnections[BoundedConnection]"
    observer: FaceObserver


class BoundedConnection(H11Protocol):
    """A connection that ends when its client is too slow.

    Nothing here runs for a piece of an answer: what the client is to read in time is looked at
    only when the transport says that too much of it waits.
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
        # Of asyncio's transports: the size of the buffer that it reads into.
        setattr(transport, "max_size", READ_AT_ONCE_BYTES)  # noqa: B010 - not in its interface
        bounds = self._face.bounds
        fewest_bytes = bounds.read_bytes_per_second * bounds.unread_seconds
        self._unread = UnreadWatch(
            *(self.loop, transport, bounds.unread_seconds, fewest_bytes, self._on_stalled)
        )
        self._face.connections.enter(self, "idle")
        self._await_request(bounds.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._face.connections.closed(self)
        self._stop_request_timer()
        self._unread.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what came, and note what is missing."""
        if self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return  # sent behind a last request; h11 would take it for a fault of the answer
        super().data_received(data)
        self._note_awaited()
        if self._awaited == "idle":
            self._has_begun = True
            if self._request_due is None:
                self._await_request(self._face.bounds.head_seconds)

    def on_response_complete(self) -> None:
        """Wait for the next head, or for the end."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_last_read()
            return
        self._note_awaited()
        if self._awaited == "body":  # refused unread; to close now could cost the client its answer
            self._await_request(self._face.bounds.body_seconds)

    def pause_writing(self) -> None:
        """Look in some time at what the client has read."""
        super().pause_writing()
        self._unread.begin()

    def resume_writing(self) -> None:
        """Let a client that reads take its time."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unread.end()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        super().timeout_keep_alive_handler()
        self._await_last_read()

    def shutdown(self) -> None:
        """Close the connection, or let its answer be the last."""
        super().shutdown()
        self._await_last_read()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(BAD_REQUEST)

    def drop(self) -> None:
        """Give the connection's place to another."""
        self._face.observer.rejected("connections")
        self._end()

    def _note_awaited(self) -> None:
        if self.transport.is_closing():
            return
        before, self._awaited = self._awaited, _awaited(self.conn.their_state)
        phase = self._awaited
        if phase == "idle" and self.transport.get_write_buffer_size():
            phase = "answer"  # what lies in the transport yet would be lost with the connection
        self._face.connections.enter(self, phase)
        if self._awaited != before:
            self._has_begun = False
            self._stop_request_timer()

    def _await_request(self, seconds: float) -> None:
        self._request_due = self.loop.call_later(seconds, self._on_request_due)

    def _on_request_due(self) -> None:
        self._request_due = None
        if self._awaited == "idle" and self._has_begun:
            self._face.observer.rejected("slow_client")
            self._refuse(TOO_SLOW)
        else:
            self._end()  # nothing was asked, or it was answered

    def _await_last_read(self) -> None:
        """Bound the time of a connection that closes once its client has read what it sent."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._unread.begin()

    def _on_stalled(self) -> None:
        self._face.observer.rejected("slow_client")
        self._end()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that is not complete, unless an answer has begun; then close."""
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
        self._face.connections.closed(self)
        self.transport.abort()

    def _stop_request_timer(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None


def _awaited(their_state: type[object]) -> Phase:
    if their_state is h11.IDLE:
        return "idle"
    return "body" if their_state is h11.SEND_BODY else "answer"
