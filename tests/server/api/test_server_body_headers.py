"""Compressed bodies, bodies that are said not to be JSON, and bodies that nobody would read."""

import asyncio
import gzip
import json
import zlib

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from kvell.errors import Bound
from kvell.server.access.bodies import BodyBounds
from kvell.server.api.door.guards import BodyLimit
from tests.server.api.bodies import answer, echo

pytestmark = pytest.mark.xdist_group("fake_server")

BODY = json.dumps({"prompt": "hello " * 20}).encode()
GZIPPED = gzip.compress(BODY)
JSON = {"content-type": "application/json"}


def limited(most_bytes: int = 1000, told: list[Bound] | None = None) -> BodyLimit:
    rejected = (told if told is not None else []).append
    return BodyLimit(echo, most_bytes, bounds=BodyBounds(), rejected=rejected)


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", GZIPPED),
        ("GZIP", GZIPPED),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
    ],
    ids=["gzip", "GZIP", "deflate", "identity"],
)
def test_a_compressed_body_is_read_as_it_was(encoding: str, content: bytes) -> None:
    reply = answer(limited(), headers=JSON | {"content-encoding": encoding}, content=content)
    assert (reply.status_code, reply.content) == (200, BODY)


def test_a_small_body_that_would_become_a_large_one_is_413() -> None:
    told: list[Bound] = []
    bomb = gzip.compress(b'{"prompt": "' + b" " * 50_000_000 + b'"}')
    assert len(bomb) < 100_000
    app = limited(200_000, told)
    reply = answer(app, headers=JSON | {"content-encoding": "gzip"}, content=bomb)
    assert reply.status_code == 413
    assert told == ["body_bytes"]


@pytest.mark.parametrize(
    "content", [b"not gzip", GZIPPED[:-9], GZIPPED + b"more"], ids=["another", "cut", "longer"]
)
def test_a_body_that_is_not_what_its_header_says_names_the_header(content: bytes) -> None:
    reply = answer(limited(), headers=JSON | {"content-encoding": "gzip"}, content=content)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content-encoding")


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
def test_an_unknown_compression_is_415_and_named(encoding: str) -> None:
    reply = answer(limited(), headers=JSON | {"content-encoding": encoding}, content=b"x")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (415, "content-encoding")
    assert error["message"].startswith(f"content-encoding={encoding}: ")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_a_body_that_is_said_to_be_something_else_is_415_and_named(kind: str, status: int) -> None:
    reply = answer(limited(), headers={"content-type": kind}, content=BODY)
    assert reply.status_code == status
    if status == 415:
        assert reply.json()["error"]["param"] == "content-type"
        assert "application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("", 200), ("application/json", 200), ("application/x-www-form-urlencoded", 415)],
)
def test_a_post_without_a_body_needs_no_type_but_is_no_form(kind: str, status: int) -> None:
    assert answer(limited(), headers={"content-type": kind}).status_code == status


def test_the_app_sees_plain_json_whatever_the_headers_were() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await echo(scope, receive, send)

    headers = {"content-encoding": "gzip", "content-type": "application/x+json", "x-mine": "kept"}
    guarded = BodyLimit(app, 1000, bounds=BodyBounds())
    assert answer(guarded, headers=headers, content=gzip.compress(BODY)).content == BODY
    told = dict(seen[0]["headers"])
    assert told[b"content-type"] == b"application/json"
    assert told[b"x-mine"] == b"kept"
    assert not {b"content-encoding", b"content-length"} & told.keys()


def test_a_body_that_no_handler_wants_is_never_read() -> None:
    async def unread() -> Message:
        raise AssertionError("the body was read")

    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/nowhere", "headers": []}
    asyncio.run(BodyLimit(nobody, 10, reads=lambda scope: False)(scope, unread, send))
    assert sent[0]["status"] == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/complete", 404), ("PUT", "/v1/completions", 405), ("POST", "/livez", 405)],
)
def test_an_unknown_route_is_named_before_its_body(
    server_url: str, method: str, path: str, status: int
) -> None:
    headers = {"content-type": "text/plain", "content-encoding": "br"}
    reply = httpx.request(method, server_url + path, content=b"{", headers=headers)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_a_server_reads_what_was_compressed(server_url: str) -> None:
    body = gzip.compress(json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 2}).encode())
    headers = JSON | {"content-encoding": "gzip"}
    reply = httpx.post(f"{server_url}/v1/completions", content=body, headers=headers)
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 2)
