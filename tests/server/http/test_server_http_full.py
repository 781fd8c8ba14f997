"""Connections that say nothing do not keep others out, though descriptors are few."""

import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from kvell.errors import ChangeSomething
from kvell.server import run as fitting
from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.http.connection import OpenConnections, Phase
from kvell.server.run import FEWEST, RESERVED, connections_that_fit
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


def connections(*phases: Phase) -> OpenConnections[int]:
    found: OpenConnections[int] = OpenConnections(8)
    for number, phase in enumerate(phases):
        found.enter(number, phase)
    return found


def test_the_one_goes_that_has_waited_longest_for_a_head() -> None:
    found = connections("answer", "body", "idle", "idle")
    assert found.longest_waiting() == 2
    found.enter(2, "idle")  # another byte of its head
    assert found.longest_waiting() == 2
    found.enter(2, "answer")
    found.enter(2, "idle")  # it has asked since, so the other waits for longer
    assert found.longest_waiting() == 3


def test_unfinished_bodies_go_next_and_answers_never() -> None:
    found = connections("arriving", "answer", "body")
    assert found.longest_waiting() == 2
    found.on_closed(2)
    found.on_closed(2)
    assert found.longest_waiting() is None
    assert (len(found), found.count("answer"), found.count("body")) == (2, 1, 0)


SCRIPT = """
import resource, sys
from kvell.device.open_files import allow_open_files
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(wanted if wanted else None), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "after"),
    [
        (64, 200, 100, "100 100 200"),  # no more than wanted
        (64, 200, 300, "200 200 200"),  # no more than allowed
        (64, 200, 0, "200 200 200"),
        (64, 200, 32, "64 64 200"),  # never lowered
    ],
)
def test_the_limit_is_raised_as_far_as_wanted(
    soft: int, hard: int, wanted: int, after: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(wanted)]
    assert subprocess.check_output(command, text=True).strip() == after


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    limits = [0]

    def allow(wanted: int) -> int:
        limits.append(wanted)
        return min(wanted, limits[0])

    monkeypatch.setattr(fitting, "allow_open_files", allow)
    return limits


@pytest.mark.parametrize(
    ("limit", "fit"), [(1 << 20, 4096), (5462, 4096), (4096, 3072), (256, 152)]
)
def test_a_reserve_stays_for_all_else(open_files: list[int], limit: int, fit: int) -> None:
    open_files[0] = limit
    assert connections_that_fit(4096, instances=1) == fit
    assert limit - fit >= RESERVED or fit == 4096


def test_too_few_are_refused_with_the_remedy(open_files: list[int]) -> None:
    open_files[0] = RESERVED + FEWEST
    with pytest.raises(ChangeSomething, match=r"max_connections=4096: .* of 120 or more \(ulimit"):
        connections_that_fit(4096, instances=1)
    open_files[0] = 120
    assert connections_that_fit(4096, instances=1) == FEWEST
    with pytest.raises(ChangeSomething, match="ask for 16 or more"):
        connections_that_fit(FEWEST - 1, instances=1)


def test_this_process_keeps_its_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections_that_fit(FEWEST, instances=1) == FEWEST
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
