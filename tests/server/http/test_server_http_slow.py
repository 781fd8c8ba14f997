"""Clients that take their time: strangers' connections end, honest ones are not cut."""

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.http.bounded_server import MAX_BODY_BYTES
from tests.server.http.clients import (
    HOST,
    RunningServer,
    request_bytes,
    rest_of,
    running_server,
    trickle,
)

HEAD_SECONDS = 0.8
STEP_SECONDS = 1.0
BOUNDS = {
    "head_seconds": HEAD_SECONDS,
    "body_seconds": HEAD_SECONDS,
    "body_bytes_per_second": 500,
    "unread_seconds": HEAD_SECONDS,
    "keep_alive_seconds": 3,
}
PAUSE_SECONDS = 0.05
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
LARGEST = b"a" * MAX_BODY_BYTES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("slow") / "log"
    with running_server(log, BOUNDS, "--step-seconds", str(STEP_SECONDS)) as running:
        yield running


def error_of(answer: bytes, status: bytes) -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in head.lower()
    error: dict[str, str] = json.loads(body)["error"]
    return error


def test_a_head_that_comes_byte_by_byte_is_408(server: RunningServer) -> None:
    before = server.rejected("slow_client")
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        error = error_of(trickle(client, b"a", PAUSE_SECONDS), b"408 Request Timeout")
    assert error["type"] == "timeout_error"
    assert server.rejected("slow_client") == before + 1


@pytest.mark.long
def test_a_later_head_of_a_connection_is_bounded_like_its_first(server: RunningServer) -> None:
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"G")
        answer = trickle(client, b"E", PAUSE_SECONDS)
        error_of(answer[answer.index(b"HTTP/1.1") :], b"408")


def test_a_connection_that_says_nothing_is_closed_without_an_answer(
    server: RunningServer,
) -> None:
    with server.connect() as client:
        assert rest_of(client) == b""


@pytest.mark.parametrize(
    ("head", "piece"),
    [(UNFINISHED, b"a"), pytest.param(CHUNKED, b"1\r\na\r\n", marks=pytest.mark.long)],
    ids=["length", "chunks"],
)
def test_a_body_that_comes_byte_by_byte_is_408(
    server: RunningServer, head: bytes, piece: bytes
) -> None:
    before = server.rejected("slow_client")
    with server.connect() as client:
        client.sendall(head)
        error = error_of(trickle(client, piece, PAUSE_SECONDS), b"408")
    assert error["message"] == "the body did not arrive in time"
    assert server.rejected("slow_client") == before + 1


def test_a_body_that_comes_at_some_pace_has_its_time(server: RunningServer) -> None:
    whole = request_bytes({"max_tokens": 1, "prompt": "x" * 1500})
    size = len(whole) // 10 + 1
    with server.connect() as client:
        for begin in range(0, len(whole), size):
            client.sendall(whole[begin : begin + size])
            time.sleep(2 * HEAD_SECONDS / 10)  # twice as long as a body may take that stays away
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_body_that_goes_on_after_it_was_refused_ends(server: RunningServer) -> None:
    too_long = UNFINISHED.replace(b"100000", b"100000000")
    with server.connect() as client:
        client.sendall(too_long)
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
        assert b"HTTP/1.1" not in trickle(client, b"a" * 1000, PAUSE_SECONDS)


def test_what_is_no_http_is_400_and_nothing_is_logged_of_it(server: RunningServer) -> None:
    bad_chunk = CHUNKED.replace(b"completions", b"nothing") + b"zz\r\n"
    for sent in (b"\x16\x03\x01\x02\x00\r\n\r\n", bad_chunk):
        with server.connect() as client:
            client.sendall(sent)
            assert error_of(rest_of(client), b"400")["type"] == "invalid_request_error"
    with server.connect() as client:  # behind an answer, where no other can be given
        client.sendall(CHUNKED + b"%x\r\n" % len(LARGEST) + LARGEST + b"\r\n1\r\na\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
        client.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in rest_of(client)
    assert server.complaints() == []


def test_what_follows_a_last_request_is_ignored(server: RunningServer) -> None:
    whole = request_bytes({"max_tokens": 1}).replace(HOST, HOST + b"Connection: close\r\n")
    with server.connect() as client:
        client.sendall(whole)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client.sendall(b"more")
        answer = rest_of(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    assert server.complaints() == []


@pytest.mark.parametrize("name", [b"x" * 40_000, b"x: y\r\n" * 20_000], ids=["long", "many"])
def test_a_head_is_bounded(server: RunningServer, name: bytes) -> None:
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + HOST)
        answer = send_to_the_end(client, name)
    assert b"200 OK" not in answer


def send_to_the_end(client: socket.socket, sent: bytes) -> bytes:
    try:
        client.sendall(sent + b"\r\n\r\n")
    except ConnectionError:
        return b""
    return rest_of(client)


def test_pauses_between_requests_and_between_tokens_cut_nobody(server: RunningServer) -> None:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 2, "stream": True}
    with httpx.Client(base_url=server.url) as client:
        first = address_of(client.get("/health"))
        time.sleep(1.5 * HEAD_SECONDS)
        with client.stream("POST", "/v1/completions", json=body) as reply:
            again = address_of(reply)
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert again == first, "it is the same connection"


def address_of(reply: httpx.Response) -> tuple[str, int]:
    address: tuple[str, int] = reply.extensions["network_stream"].get_extra_info("client_addr")
    return address
