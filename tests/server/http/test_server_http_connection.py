"""Connections in this process, over an app that answers with more than anybody's buffers hold."""

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import ClassVar

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from kvell.errors import Bound
from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.http.connection import (
    READ_AT_ONCE_BYTES,
    Acceptor,
    BoundedConnection,
    Face,
    OpenConnections,
)
from kvell.server.metrics.front_metrics import ServerMetrics

LARGE = b"x" * (16 << 20)
CONTENTS = {"/large": LARGE, "/medium": LARGE[: 64 << 10]}
PIPELINED = 500
CALLS: list[str] = []
"""Paths that were asked for."""
BOUNDS = HttpBounds(max_connections=16, unread_seconds=0.2, read_bytes_per_second=1000)
REQUEST = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    CALLS.append(scope["path"])
    content = CONTENTS.get(scope["path"], scope["path"].encode())
    headers = {"Connection": "close"} if scope["path"] == "/large" else {}
    await Response(content, headers=headers)(scope, receive, send)


class Observed(ServerMetrics):
    def __init__(self) -> None:
        super().__init__("m")
        self.bounds: list[Bound] = []
        self.statuses: list[int] = []

    def on_rejected(self, bound: Bound) -> None:
        self.bounds.append(bound)

    def answered_over_http(self, path: str, status: int) -> None:
        self.statuses.append(status)


Ask = Callable[[tuple[str, int], Face, Observed], Awaitable[None]]


def served(
    ask: Ask,
    bounds: HttpBounds = BOUNDS,
    connection: type[BoundedConnection] = BoundedConnection,
    listener: type[socket.socket] = socket.socket,
) -> None:
    """Let a client ask a server of its own; nothing of either is left behind."""

    async def run() -> None:
        observed = Observed()
        face = Face(bounds, OpenConnections(bounds.max_connections), observed)
        config = uvicorn.Config(app, lifespan="off", log_config=None, log_level="error")
        config.load()
        state = ServerState()
        with listener(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            acceptor = Acceptor(listening, face, lambda: connection(face, config, state, {}))
            try:
                await ask(listening.getsockname(), face, observed)
            finally:
                acceptor.close()
                async with asyncio.timeout(20):
                    while len(face.connections):
                        await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_closing_connection_does_not_wait_for_its_client_for_ever() -> None:
    async def ask(address: tuple[str, int], face: Face, observed: Observed) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST % b"large")
        async with asyncio.timeout(20):
            while not observed.bounds:
                await asyncio.sleep(0.01)
        assert observed.bounds == ["slow_client"]
        assert len(await reader.read()) < len(LARGE)
        writer.close()

    served(ask)


def test_pipelined_requests_wait_until_answers_are_read() -> None:
    async def ask(address: tuple[str, int], face: Face, observed: Observed) -> None:
        CALLS.clear()
        _, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST % b"medium" * PIPELINED)
        async with asyncio.timeout(20):
            while not observed.bounds:
                await asyncio.sleep(0.01)
        assert observed.bounds == ["slow_client"]
        assert 1 < len(CALLS) < PIPELINED
        writer.transport.abort()

    served(ask)


def test_the_place_of_the_oldest_goes_to_a_newcomer() -> None:
    async def ask(address: tuple[str, int], face: Face, observed: Observed) -> None:
        opened = [await asyncio.open_connection(*address) for _ in range(17)]
        for reader, writer in opened[1:]:  # whoever comes later is served
            writer.write(REQUEST % b"small")
            assert await reader.readuntil(b"/small")
        assert await opened[0][0].read() == b""
        assert observed.bounds == ["connections"]
        assert len(face.connections) == 16
        for _, writer in opened:
            writer.close()

    served(ask)


def test_a_newcomer_is_told_if_all_places_are_taken_by_answers() -> None:
    async def ask(address: tuple[str, int], face: Face, observed: Observed) -> None:
        opened = [await asyncio.open_connection(*address) for _ in range(16)]
        for _, writer in opened:
            writer.write(REQUEST % b"large")
        async with asyncio.timeout(20):
            while face.connections.count("answer") < 16:
                await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*address)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"retry-after: 1\r\n" in answer
        for _, each in (*opened, (reader, writer)):
            each.transport.abort()

    served(ask, HttpBounds(max_connections=16))


class Exhausted(socket.socket):
    """A listener in a process that has no descriptors left, for its first few tries."""

    failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_descriptors_a_pause_is_made_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(address: tuple[str, int], face: Face, observed: Observed) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST % b"small")
        assert await reader.readuntil(b"/small")  # once there are some
        writer.close()

    served(ask, listener=Exhausted)
    assert [record.getMessage() for record in caplog.records] == ["accept_failed"]


class Noting(BoundedConnection):
    """Notes how much it is given at once."""

    pieces: ClassVar[list[int]] = []

    def data_received(self, data: bytes) -> None:
        self.pieces.append(len(data))
        super().data_received(data)


def test_what_is_read_at_once_is_bounded() -> None:
    body = b"a" * 500_000

    async def ask(address: tuple[str, int], face: Face, observed: Observed) -> None:
        _, writer = await asyncio.open_connection(*address)
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        async with asyncio.timeout(20):
            while sum(Noting.pieces) < len(head + body):
                await asyncio.sleep(0.01)
        assert max(Noting.pieces) == READ_AT_ONCE_BYTES
        writer.close()

    served(ask, connection=Noting)
