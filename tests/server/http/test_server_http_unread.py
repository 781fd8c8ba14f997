"""Clients that do not read their answers, and one that does, though slowly."""

import time
from collections.abc import Iterator

import pytest

from tests.patience import until
from tests.server.http.clients import RunningServer, request_bytes, rest_of, running_server

UNREAD_SECONDS = 1.5
BOUNDS = {"unread_seconds": UNREAD_SECONDS, "read_bytes_per_second": 500, "keep_alive_seconds": 1}
STREAM = request_bytes({"max_tokens": 4000, "stream": True, "n": 8})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("unread") / "log"
    with running_server(log, BOUNDS, "--step-seconds", "0.005") as running:
        yield running


def test_a_client_that_stops_reading_is_cut_and_its_request_cancelled(
    server: RunningServer,
) -> None:
    before = server.rejected("slow_client")
    with server.connect_with_little_room() as client:
        client.sendall(STREAM)
        until(lambda: server.rejected("slow_client") == before + 1)
        until(lambda: server.samples("request_success_total")["cancelled"] == 8)
        assert not rest_of(client).endswith(b"0\r\n\r\n")
    assert server.samples("num_requests_running")["mixed-0"] == 0


def test_a_client_that_reads_slowly_is_not_cut(server: RunningServer) -> None:
    before = server.rejected("slow_client")
    with server.connect_with_little_room() as client:
        client.sendall(STREAM)
        received = client.recv(4096)
        began = time.monotonic()
        while time.monotonic() < began + 2 * UNREAD_SECONDS:
            received += client.recv(4096)
            time.sleep(0.02)
        assert server.samples("http_connections")["answer"] == 2  # its own, and the scrape
    assert server.rejected("slow_client") == before
