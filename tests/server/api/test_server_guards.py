"""Body limits, in front of an app that repeats what it was sent."""

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvell.server.access.bodies import BodyBounds
from kvell.server.api.access_guard import Access, AccessGuard
from kvell.server.api.guards import BodyLimit


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(body)(scope, receive, send)


def answer(
    app: ASGIApp, path: str = "/v1/x", headers: dict[str, str] | None = None, content: bytes = b""
) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, headers=headers, content=content)

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_body_within_the_limit_passes_whole(size: int) -> None:
    body = bytes(range(size))
    reply = answer(BodyLimit(echo, 100), content=body)
    assert (reply.status_code, reply.content) == (200, body)


def test_a_body_beyond_the_limit_is_413() -> None:
    reply = answer(BodyLimit(echo, 100), content=b"x" * 101)
    assert reply.status_code == 413
    assert "100 bytes" in reply.json()["error"]["message"]


def test_an_announced_length_is_refused_before_the_body_is_read() -> None:
    sent: list[Message] = []

    async def unread() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"content-length", b"101")]}
    asyncio.run(BodyLimit(echo, 100)(scope, unread, send))
    assert sent[0]["status"] == 413


def test_a_body_in_pieces_is_joined_and_bounded_and_the_disconnect_still_comes() -> None:
    pieces = [b"ab", b"cd", b""]
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])

    async def receive() -> Message:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        raise AssertionError("nothing is to be sent")

    asyncio.run(BodyLimit(app, 4)({"type": "http", "headers": []}, receive, send))
    assert seen[0]["body"] == b"abcd"
    assert seen[1]["type"] == "http.disconnect"


def test_other_protocols_pass_the_guards_by() -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError("nothing is to be read")

    async def send(message: Message) -> None:
        raise AssertionError("nothing is to be sent")

    chain = AccessGuard(BodyLimit(app, 1), Access())
    asyncio.run(chain({"type": "lifespan"}, receive, send))
    assert seen == ["lifespan"]


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        (b'{"stop":[' + b'"x",' * 100_000 + b'"x"]}', "stop", "more than 4096 elements"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "a", "nested more than 64 deep"),
        (b"[1]", None, "not valid JSON"),
        (b"\xff\xfe{\x00}\x00", None, "not UTF-8"),
    ],
)
def test_a_body_beyond_its_bounds_is_400_and_names_the_field(
    body: bytes, param: str | None, problem: str
) -> None:
    reply = answer(BodyLimit(echo, 1 << 20, BodyBounds()), content=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert problem in error["message"]


@pytest.mark.parametrize("body", [b"", b'{"stop":["x"]}'])
def test_a_body_within_its_bounds_arrives_as_it_was_sent(body: bytes) -> None:
    reply = answer(BodyLimit(echo, 100, BodyBounds()), content=body)
    assert (reply.status_code, reply.content) == (200, body)
