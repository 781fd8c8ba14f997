"""An HTTP/1.1 client for many concurrent streams, with little time of its own.

Connections are reused; a connection that the server has closed is replaced.

::

    idle ──post──► head ──200──► body ──end──► idle
                    │ other status ─► Refused   └─ closed early: connection closed
                    └─ lost before the head on a reused connection: sent again on another

One HTTP/1.1 connection of a client, with h11 for the protocol.

A packet gets the event loop's time on arrival, before any task is woken, so that latencies do not
include the queue of a client with many open streams.
"""

import asyncio
import os
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from urllib.parse import urlsplit

import h11
import msgspec

from kvell.errors import ChangeSomething
from kvell.load.answers import error_text
from kvell.load.http.wire import ConnectionFailed, RefusedResponse
from kvell.wire.decoding import MalformedError, decode

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
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, which have the event loop's time of now."""
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

    def eof_received(self) -> None:
        """Record that the server has sent everything, which ends some answers."""
        self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection is closed, and wake the waiting task."""
        if self._failed is None:
            self.data_received(b"")
            self._failed = LOST
        self._transport = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


CONNECT_SECONDS = 30.0
PREFLIGHT_SECONDS = 10.0


class HttpClient:
    """A client of one server, which must be closed in its event loop.

    :param base_url: with or without ``/v1`` at its end.
    :raises ChangeSomething: if the URL is invalid.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = -1
        if url.scheme not in ("http", "https") or not url.hostname or port == -1:
            remedy = "use one like http://127.0.0.1:8000"
            raise ChangeSomething("--base-url", base_url, "is not an address of a server", remedy)
        self._host = url.hostname
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: list[Connection] = []

    async def answer_to(self, path: str) -> tuple[int, bytes]:
        """Return status and body.

        :raises ConnectionFailed: if there is no answer.
        """
        try:
            async with asyncio.timeout(PREFLIGHT_SECONDS):
                connection, head = await self._sent("GET", path, b"")
                return head.status_code, await self._rest(connection)
        except TimeoutError as error:
            raise ConnectionFailed(f"no answer within {PREFLIGHT_SECONDS:g} s") from error

    async def stream_of(self, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        """Yield the pieces of a streamed answer, each with its arrival time in the event loop.

        Closing the generator early closes the connection.

        :raises RefusedResponse: if the status is not 200.
        :raises ConnectionFailed: if there is no connection, or it breaks.
        """
        connection, head = await self._sent("POST", path, body)
        if head.status_code != 200:
            raise RefusedResponse(head.status_code, error_text(await self._rest(connection)))
        async with aclosing(self._pieces(connection)) as pieces:
            async for piece in pieces:
                yield piece

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _sent(self, method: str, path: str, body: bytes) -> tuple[Connection, h11.Response]:
        """Send a request; return its connection and the head of the answer."""
        while True:
            while self._idle and not self._idle[-1].is_open:
                self._idle.pop()
            was_used = bool(self._idle)
            connection = self._idle.pop() if was_used else await self._connected()
            try:
                connection.send(method, self._prefix + path, self._headers, body)
                while True:
                    _, event = await connection.receive()
                    if isinstance(event, h11.Response):
                        return connection, event
            except ConnectionFailed:
                connection.close()
                if not was_used:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _rest(self, connection: Connection) -> bytes:
        async with aclosing(self._pieces(connection)) as pieces:
            return b"".join([data async for _, data in pieces])

    async def _pieces(self, connection: Connection) -> AsyncGenerator[tuple[float, bytes], None]:
        """Yield the pieces of a body with their times; the connection is free afterwards."""
        is_whole = False
        try:
            while True:
                at_seconds, event = await connection.receive()
                if isinstance(event, h11.EndOfMessage):
                    is_whole = True
                    return
                if isinstance(event, h11.Data):
                    yield at_seconds, bytes(event.data)
        finally:
            self._give_back(connection, is_whole=is_whole)

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise ConnectionFailed("no connection in time") from error
        except OSError as error:
            raise ConnectionFailed(f"no connection ({_reason(error)})") from error
        return connection

    def _give_back(self, connection: Connection, *, is_whole: bool) -> None:
        if is_whole and connection.renew():
            self._idle.append(connection)
        else:
            connection.close()


def _reason(error: OSError) -> str:
    """Return the system's text for an error; asyncio's own text repeats the address."""
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)
    return error.strerror or str(error)


MODELS = "/v1/models"
MOST_NAMES = 5


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_CARDS = msgspec.json.Decoder(_Cards)


async def served_model(client: HttpClient, base_url: str, wanted: str | None) -> str:
    """Return the model name to request; a server that lists no models is not checked.

    :param wanted: None: the server's only model.
    :raises ChangeSomething: if the server does not answer, needs a key, or has no such model.
    """
    try:
        status, body = await client.answer_to(MODELS)
    except ConnectionFailed as error:
        remedy = "start the server, or give its address"
        problem = f"does not answer: {error}"
        raise ChangeSomething("--base-url", base_url, problem, remedy) from error
    if status in (401, 403):
        problem = f"is not accepted (HTTP {status}: {error_text(body)})"
        raise ChangeSomething("--api-key", "…", problem, "give the server's key")
    return _chosen(_names(body) if status == 200 else [], base_url, wanted)


def _names(body: bytes) -> list[str]:
    try:
        return [card.id for card in decode(_CARDS, body).data]
    except MalformedError:
        return []


def _chosen(names: list[str], base_url: str, wanted: str | None) -> str:
    listed = " or ".join(names[:MOST_NAMES])
    if wanted is None:
        if len(names) == 1:
            return names[0]
        problem = f"cannot be guessed at {base_url}"
        raise ChangeSomething("--model", "", problem, f"give {listed or 'the name it serves'}")
    if names and wanted not in names:
        raise ChangeSomething("--model", wanted, f"is not served at {base_url}", f"use {listed}")
    return wanted
