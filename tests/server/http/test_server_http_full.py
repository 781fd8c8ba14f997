"""Connections that say nothing do not keep others out, though descriptors are few."""

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from kvell.server.api.door.http_bounds import HttpBounds
from tests.patience import until
from tests.server.http.clients import (
    RunningServer,
    is_open,
    read_waiting,
    request_bytes,
    running_server,
)

MOST_OPEN = 256
FIT = 152
"""Connections that so many files allow."""
SILENT = 300
LARGEST_LOG_BYTES = 20_000
BODY = {"model": "fake", "prompt": "hi", "max_tokens": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("full") / "log"
    args = ("--step-seconds", "0.02", "--credits", "4")
    with running_server(log, {}, *args, most_open=MOST_OPEN) as running:
        yield running


def test_silent_connections_leave_room_for_those_who_ask(server: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        long_stream = stack.enter_context(server.connect())
        long_stream.sendall(request_bytes({"max_tokens": 4000, "stream": True}))
        assert long_stream.recv(65536).startswith(b"HTTP/1.1 200 OK")
        silent = [stack.enter_context(server.connect()) for _ in range(SILENT)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert reply.status_code == 200
        assert server.rejected("connections") >= SILENT - MOST_OPEN
        until(lambda: sum(map(is_open, silent)) < MOST_OPEN)
        assert not is_open(silent[0])  # the oldest went, not the newest
        assert is_open(silent[-1])
        open_now = server.samples("http_connections")
        assert 0 < open_now["idle"] < MOST_OPEN
        assert open_now["answer"] == 2  # the stream, and the scrape itself
        read_waiting(long_stream)
        assert b"data: {" in long_stream.recv(65536)  # it still goes on
    assert server.log.stat().st_size < LARGEST_LOG_BYTES
    assert server.events().count("connections_full") == 1
    assert server.events().count("fewer_connections") == 1


def test_a_server_that_is_full_of_requests_says_so_and_is_healthy(server: RunningServer) -> None:
    most = HttpBounds(max_connections=FIT).most_served
    with contextlib.ExitStack() as stack:
        for _ in range(most):
            client = stack.enter_context(server.connect())
            client.sendall(request_bytes({"max_tokens": 4000, "stream": True}))
        until(lambda: server.samples("http_connections")["answer"] == most + 1)  # and the scrape
        before = server.rejected("connections")
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["error"]["type"] == "service_unavailable_error"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.rejected("connections") == before + 1
