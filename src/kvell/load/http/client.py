"""An HTTP/1.1 client for many concurrent streams, with little time of its own.

Connections are reused; a connection that the server has closed is replaced.

::

    idle ──post──► head ──200──► body ──end──► idle
                    │ other status ─► Refused   └─ closed early: connection closed
                    └─ lost before the head on a reused connection: sent again on another
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import h11

from kvell.errors import ChangeSomething
from kvell.load.answers import error_text
from kvell.load.http.connection import Connection
from kvell.load.http.wire import ConnectionFailed, RefusedResponse

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

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body; see :class:`kvell.load.http.wire.Client`."""
        try:
            async with asyncio.timeout(PREFLIGHT_SECONDS):
                connection, head = await self._sent("GET", path, b"")
                return head.status_code, await self._rest(connection)
        except TimeoutError as error:
            raise ConnectionFailed(f"no answer within {PREFLIGHT_SECONDS:g} s") from error

    async def post(self, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        """Yield the pieces of a streamed answer; see :class:`kvell.load.http.wire.Client`."""
        connection, head = await self._sent("POST", path, body)
        if head.status_code != 200:
            raise RefusedResponse(head.status_code, error_text(await self._rest(connection)))
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

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _sent(self, method: str, path: str, body: bytes) -> tuple[Connection, h11.Response]:
        """Send a request; return its connection and the head of the answer."""
        while True:
            connection = self._idle_one()
            was_used = connection is not None
            connection = connection or await self._connected()
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
        """Return the whole body of an answer that is not streamed."""
        content, is_whole = b"", False
        try:
            while True:
                _, event = await connection.receive()
                if isinstance(event, h11.EndOfMessage):
                    is_whole = True
                    return content
                if isinstance(event, h11.Data):
                    content += event.data
        finally:
            self._give_back(connection, is_whole=is_whole)

    def _idle_one(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

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
