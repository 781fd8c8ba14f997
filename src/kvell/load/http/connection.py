"""One HTTP/1.1 connection of a client, with h11 for the protocol.

A packet gets the event loop's time on arrival, before any task is woken, so that latencies do not
include the queue of a client with many open streams.
"""

import asyncio
from collections import deque
from collections.abc import Mapping

import h11

from kvell.load.http.wire import ConnectionFailed

Event = h11.Response | h11.Data | h11.EndOfMessage
LOST = "the connection was lost"


class Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._h11 = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._arrived: deque[tuple[float, Event]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failed: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._failed is None and self._transport is not None

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Write a whole request.

        :raises ConnectionFailed: if the connection is closed.
        """
        if self._transport is None or self._failed is not None:
            raise ConnectionFailed(self._failed or LOST)
        fields = dict(headers)
        if body:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        parts = (request, h11.Data(data=body), h11.EndOfMessage())
        self._transport.write(b"".join(self._h11.send(part) or b"" for part in parts))

    async def receive(self) -> tuple[float, Event]:
        """Return the next part of the answer and the arrival time of its bytes.

        :raises ConnectionFailed: if there will be none.
        """
        while not self._arrived:
            if self._failed is not None:
                raise ConnectionFailed(self._failed)
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._arrived.popleft()

    def renew(self) -> bool:
        """Prepare for another request; return whether the server will accept one."""
        if not self.is_open or self._h11.our_state is not h11.DONE:
            return False
        if self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    def close(self) -> None:
        """Close immediately, even in the middle of an answer."""
        self._failed = self._failed or LOST
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the open connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._take(data)

    def eof_received(self) -> None:
        """Record that the server has sent everything, which ends some answers."""
        self._take(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection is closed, and wake the waiting task."""
        if self._failed is None:
            self._take(b"")
            self._failed = LOST
        self._transport = None
        self._wake()

    def _take(self, data: bytes) -> None:
        at_seconds = self._loop.time()
        try:
            self._h11.receive_data(data)
            while True:
                event = self._h11.next_event()
                if isinstance(event, Event):
                    self._arrived.append((at_seconds, event))
                elif not isinstance(event, h11.InformationalResponse):
                    break
        except h11.RemoteProtocolError as error:
            self._failed = LOST if not data else f"not HTTP ({error})"
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
