"""HTTP on real sockets: streams, reused connections, clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import ConnectionFailed, RefusedResponse

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def with_length(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


async def request_of(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """A request's first line, headers and body."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return lines[0], headers, await reader.readexactly(int(headers.get("content-length", 0)))


class Server:
    """A server that answers each request with ``say`` and counts connections."""

    def __init__(self, say: Handler) -> None:
        self._say, self.connections = say, 0
        self.gone = asyncio.Event()

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                await self._say(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


def says(*answers: bytes) -> Handler:
    """Answer requests in order; the last answer goes to all that follow."""
    left = list(answers)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return say


async def body_of(client: HttpClient, path: str = "/v1/completions") -> list[bytes]:
    return [data async for _, data in client.stream_of(path, b"{}")]


def on(say: Handler, work: Callable[[Server, HttpClient], Awaitable[Any]], **more: Any) -> Any:
    async def run() -> Any:
        async with Server(say) as server:
            client = HttpClient(server.url + "/v1", **more)
            try:
                return await work(server, client)
            finally:
                client.close()

    return asyncio.run(run())


STREAM = HEAD + chunk(b"data: a\n\n") + chunk(b"data: b\n\n") + b"0\r\n\r\n"


def test_pieces_of_a_stream_and_when_they_came() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        for part in (HEAD, chunk(b"one"), chunk(b"two")):
            writer.write(part)
            await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")

    async def work(_server: Server, client: HttpClient) -> list[tuple[float, bytes]]:
        return [piece async for piece in client.stream_of("/v1/completions", b"{}")]

    (first_seconds, first), (second_seconds, second) = on(say, work)
    assert (first, second) == (b"one", b"two")
    assert first_seconds < second_seconds


def test_what_is_sent() -> None:
    seen = []

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(STREAM)

    async def work(server: Server, client: HttpClient) -> str:
        async with aclosing(client.stream_of("/v1/completions", b'{"a": 1}')) as pieces:
            assert b"".join([data async for _, data in pieces]) == b"data: a\n\ndata: b\n\n"
        await client.answer_to("/metrics")
        return server.url

    url = on(say, work, api_key="secret")
    (line, headers, body), (second, others, _) = seen
    assert (line, second) == ("POST /v1/completions HTTP/1.1", "GET /metrics HTTP/1.1")
    assert body == b'{"a": 1}'
    assert headers["authorization"] == others["authorization"] == "bearer secret"
    assert headers["content-type"] == "application/json"
    assert headers["host"] == url.removeprefix("http://")


def test_connections_are_used_again() -> None:
    async def work(server: Server, client: HttpClient) -> int:
        for _ in range(5):
            assert await body_of(client) == [b"data: a\n\n", b"data: b\n\n"]
        return server.connections

    assert on(says(STREAM), work) == 1


@pytest.mark.parametrize("closing", ["Connection: close\r\n", ""])
def test_one_that_its_server_closed_is_opened_anew(closing: str) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(with_length("200 OK", b"x", closing))
        writer.close()

    async def work(server: Server, client: HttpClient) -> int:
        for _ in range(3):
            assert await body_of(client) == [b"x"]
        return server.connections

    assert on(say, work) == 3


def test_an_answer_may_end_with_the_connection() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    async def work(_server: Server, client: HttpClient) -> bytes:
        return b"".join(await body_of(client))

    assert on(say, work) == b"all of it"


def test_a_connection_that_breaks_within_an_answer() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(b"data: a\n\n"))
        writer.close()

    async def work(_server: Server, client: HttpClient) -> list[bytes]:
        heard = []
        with pytest.raises(ConnectionFailed, match="the connection was lost"):
            async for _, data in client.stream_of("/v1/completions", b"{}"):
                heard.append(data)
        return heard

    assert on(say, work) == [b"data: a\n\n"]


def test_a_server_that_never_answers_a_new_connection_is_asked_once() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.close()

    async def work(server: Server, client: HttpClient) -> int:
        with pytest.raises(ConnectionFailed, match="lost"):
            await body_of(client)
        return server.connections

    assert on(say, work) == 1


def test_a_client_that_leaves_closes_the_connection() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(b"data: a\n\n"))
        await reader.readexactly(1)  # raises when the client has gone

    async def work(server: Server, client: HttpClient) -> int:
        async with aclosing(client.stream_of("/v1/completions", b"{}")) as pieces:
            async for _ in pieces:
                break
        await server.gone.wait()
        with pytest.raises(ConnectionFailed):
            async with asyncio.timeout(5):
                server._server.close()
                await body_of(client)
        return server.connections

    assert on(say, work) == 1


def test_one_with_an_answer_that_nobody_read_is_not_used_again() -> None:
    async def work(server: Server, client: HttpClient) -> int:
        async with aclosing(client.stream_of("/v1/completions", b"{}")) as pieces:
            async for _ in pieces:  # the rest is there already
                break
        assert await body_of(client) == [b"data: a\n\n", b"data: b\n\n"]
        return server.connections

    assert on(says(STREAM), work) == 2


def test_refusals_say_why_and_keep_the_connection() -> None:
    no = with_length("429 Too Many Requests", b'{"error": {"message": "full"}}')

    async def work(server: Server, client: HttpClient) -> int:
        with pytest.raises(RefusedResponse, match="HTTP 429: full") as raised:
            await body_of(client)
        assert raised.value.status == 429
        assert await client.answer_to("/v1/models") == (429, b'{"error": {"message": "full"}}')
        assert len(await body_of(client)) == 2
        return server.connections

    assert on(says(no, no, STREAM), work) == 1


def test_what_is_not_http() -> None:
    async def work(_server: Server, client: HttpClient) -> None:
        with pytest.raises(ConnectionFailed, match="not HTTP"):
            await client.answer_to("/v1/models")

    on(says(b"SSH-2.0-nothing\r\n\r\n"), work)


def test_informational_answers_are_skipped() -> None:
    async def work(_server: Server, client: HttpClient) -> tuple[int, bytes]:
        return await client.answer_to("/health")

    assert on(says(b"HTTP/1.1 103 Early Hints\r\n\r\n" + with_length("200 OK", b"ok")), work) == (
        200,
        b"ok",
    )


def test_hundreds_of_streams_are_open_at_once() -> None:
    """No stream begins before all are open."""
    many, waiting = 300, []
    all_there = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        waiting.append(writer)
        if len(waiting) == many:
            all_there.set()
        await all_there.wait()
        writer.write(STREAM)

    async def work(server: Server, client: HttpClient) -> int:
        found = await asyncio.gather(*(body_of(client) for _ in range(many)))
        assert {b"".join(pieces) for pieces in found} == {b"data: a\n\ndata: b\n\n"}
        return server.connections

    assert on(say, work) == many


async def test_nobody_listens() -> None:
    async with Server(says(STREAM)) as server:
        url = server.url
    with pytest.raises(ConnectionFailed, match=r"no connection \(Connection refused\)"):
        await body_of(HttpClient(url))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "x"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ChangeSomething, match=r"--base-url=.*is not an address of a server"):
        HttpClient(url)
