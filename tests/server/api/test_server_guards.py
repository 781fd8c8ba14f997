"""Body limits, in front of an app that repeats what it was sent."""

import asyncio

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from kvell.errors import Bound
from kvell.server.access.bodies import BodyBounds
from kvell.server.api.door.access_guard import Access, AccessGuard
from kvell.server.api.door.guards import BodyLimit, ServedLimit
from kvell.server.api.door.http_bounds import HttpBounds
from tests.server.api.bodies import answer, echo


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_body_within_the_limit_passes_whole(size: int) -> None:
    body = bytes(range(size))
    reply = answer(BodyLimit(echo, 100), content=body)
    assert (reply.status_code, reply.content) == (200, body)


def test_a_body_beyond_the_limit_is_413() -> None:
    reply = answer(BodyLimit(echo, 100), content=b"x" * 101)
    assert reply.status_code == 413
    assert "100 bytes" in reply.json()["error"]["message"]


def test_whose_shape_a_refusal_has_is_said_by_its_path() -> None:
    refused = answer(BodyLimit(echo, 100), "/v1/messages", content=b"x" * 101)
    full = answer(ServedLimit(echo, most=0), "/v1/messages/count_tokens")
    shapeless = answer(BodyLimit(echo, 100, BodyBounds()), "/v1/messages", content=b"x")
    for reply, status, kind in (
        (refused, 413, "request_too_large"),
        (full, 503, "overloaded_error"),
        (shapeless, 400, "invalid_request_error"),
    ):
        assert (reply.status_code, reply.json()["type"]) == (status, "error")
        assert reply.json()["error"]["type"] == kind


def test_an_announced_length_is_refused_before_the_body_is_read() -> None:
    sent: list[Message] = []

    async def unread() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/x", "headers": [(b"content-length", b"101")]}
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

    asyncio.run(BodyLimit(app, 4)({"type": "http", "path": "/", "headers": []}, receive, send))
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


class Left(Exception):  # noqa: N818
    """The app saw a request whose client had left."""


@pytest.mark.parametrize("pieces", [[], [b'{"prompt": "hi"}']])
def test_a_body_whose_client_leaves_reaches_no_app(pieces: list[bytes]) -> None:
    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise Left

    async def receive() -> Message:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there to be answered")

    asyncio.run(BodyLimit(app, 100)({"type": "http", "path": "/", "headers": []}, receive, send))


def test_a_body_that_stays_away_is_408_and_the_connection_closes() -> None:
    sent: list[Message] = []
    rejected: list[Bound] = []

    async def receive() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    limit = BodyLimit(echo, 100, http=HttpBounds(body_seconds=0.01), rejected=rejected.append)
    asyncio.run(limit({"type": "http", "path": "/", "headers": []}, receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert rejected == ["slow_client"]


def test_the_time_of_a_body_grows_with_what_came() -> None:
    bounds = HttpBounds(body_seconds=30, body_bytes_per_second=1000)
    assert [bounds.seconds_for_body(count) for count in (0, 5000)] == [30, 35]


async def test_requests_beyond_those_that_are_served_are_503_but_probes_are_answered() -> None:
    rejected: list[Bound] = []
    entered, goes_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            entered.set()
            await goes_on.wait()
        await echo(scope, receive, send)

    transport = httpx.ASGITransport(ServedLimit(app, 1, rejected.append))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        held = asyncio.create_task(client.post("/held"))
        await entered.wait()
        replies = [await client.post(path) for path in ("/v1/x", "/health", "/metrics")]
        goes_on.set()
        replies += [await held, await client.post("/v1/x")]
    assert [reply.status_code for reply in replies] == [503, 200, 200, 200, 200]
    assert rejected == ["connections"]
