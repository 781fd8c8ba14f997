"""A live server with few seats: one tenant's backlog, or one request's, holds up nobody else."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

SEATS = 4
KEYS = """
[[keys]]
name = "red"
key = "red-1"

[[keys]]
name = "blue"
key = "blue-1"

[[keys]]
name = "small"
key = "small-1"
max_in_flight = 6

[[keys]]
name = "minute"
key = "minute-1"
requests_per_minute = 20
"""
MANY = {"prompt": ["p"] * 32, "n": 15, "max_tokens": 16}
"""480 sequences: 120 times all seats."""
ONE = {"prompt": "q", "max_tokens": 16}
MOST_BEFORE = 120
"""Sequences of the others that may end before one that has just come, of 480.  It waits for a seat
or two; the rest is what ends while this test connects and reads metrics."""


@contextlib.contextmanager
def server(key_file: str) -> Iterator[str]:
    script = str(Path(__file__).with_name("keyed_server.py"))
    command = [sys.executable, script, key_file, "--step-seconds", "0.005"]
    command += ["--credits", str(SEATS)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = map(json.loads, process.stderr)
        reader = threading.Thread(target=lambda: [None for _ in lines])
        try:
            url = next(line["url"] for line in lines if line["event"] == "server_started")
            reader.start()  # a full pipe would stop the server
            yield url
        finally:
            process.terminate()
            process.wait(timeout=20)
            reader.join()


@pytest.fixture(scope="module")
def keyed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    with server(str(path)) as url:
        yield url


@pytest.fixture(scope="module")
def open_url() -> Iterator[str]:
    with server("-") as url:
        yield url


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def post(url: str, key: str, body: dict[str, Any]) -> httpx.Response:
    whole = {"model": "fake", **body}
    return httpx.post(f"{url}/v1/completions", json=whole, headers=headers(key), timeout=60)


def metric(url: str, name: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvell:{name}")))


def until(url: str, name: str, most: int, least: int = 0) -> None:
    deadline = time.monotonic() + 30
    while not least <= metric(url, name) <= most:
        assert time.monotonic() < deadline, f"{name} did not become {least} to {most}"
        time.sleep(0.01)


@contextlib.contextmanager
def backlog(url: str, key: str, body: dict[str, Any]) -> Iterator[None]:
    """A request of many sequences, which run and wait; its client leaves at the end."""
    whole = {"model": "fake", "stream": True, **body}
    come, go = threading.Event(), threading.Event()

    def asks() -> None:
        path = f"{url}/v1/completions"
        with httpx.stream("POST", path, json=whole, headers=headers(key), timeout=60) as reply:
            assert reply.status_code == 200
            for _ in reply.iter_lines():
                come.set()
                if go.is_set():
                    return

    thread = threading.Thread(target=asks)
    thread.start()
    try:
        assert come.wait(30)
        yield
    finally:
        go.set()
        thread.join()
    until(url, "num_requests_waiting", 0)
    until(url, "num_requests_running", 0)


def ended_before(url: str, key: str, body: dict[str, Any]) -> int:
    """Sequences that ended while this request waited and ran, its own not counted."""
    before = metric(url, "request_success_total")
    assert post(url, key, body).status_code == 200
    return metric(url, "request_success_total") - before - 1


def test_a_tenant_waits_for_no_other_tenants_backlog(keyed_url: str) -> None:
    with backlog(keyed_url, "red-1", MANY):
        assert ended_before(keyed_url, "blue-1", ONE) <= MOST_BEFORE
        assert metric(keyed_url, "num_requests_waiting") > 100, "the backlog was worked off"


def test_requests_of_a_tenant_take_turns_too(keyed_url: str) -> None:
    with backlog(keyed_url, "red-1", MANY):
        assert ended_before(keyed_url, "red-1", ONE) <= MOST_BEFORE


def test_without_keys_every_request_has_its_turn(open_url: str) -> None:
    with backlog(open_url, "", MANY):
        assert ended_before(open_url, "", ONE) <= MOST_BEFORE


def test_a_key_has_so_many_sequences_in_flight_and_no_more(keyed_url: str) -> None:
    def rejected() -> int:
        return metric(keyed_url, 'admission_rejections_total{model_name="fake",reason="sequences"')

    slow = {"prompt": ["a", "b"], "max_tokens": 4000}
    refused = rejected()
    with backlog(keyed_url, "small-1", slow):
        late = post(keyed_url, "small-1", {**ONE, "n": 5})
        assert late.status_code == 429
        assert "2 sequences in flight and may have 6" in late.json()["error"]["message"]
        assert post(keyed_url, "small-1", {**ONE, "n": 4}).status_code == 200, "that is room"
        assert post(keyed_url, "small-1", {**ONE, "n": 4}).status_code == 200, "it is free again"
        large = post(keyed_url, "small-1", {"prompt": ["a", "b"], "n": 4})
        assert (large.status_code, large.json()["error"]["param"]) == (400, "n")
        assert "8 sequences: exceeds the 6 concurrent sequences" in large.json()["error"]["message"]
    assert rejected() == refused + 2
    assert post(keyed_url, "small-1", {**ONE, "n": 6}).status_code == 200, "all have ended"


def test_beams_are_in_flight_as_answers_are(keyed_url: str) -> None:
    body = {"prompt": "a", "max_tokens": 3, "use_beam_search": True}
    large = post(keyed_url, "small-1", {**body, "best_of": 7})
    assert (large.status_code, large.json()["error"]["param"]) == (400, "best_of")
    assert "7 sequences: exceeds the 6 concurrent sequences" in large.json()["error"]["message"]
    for _ in range(2):
        assert post(keyed_url, "small-1", {**body, "best_of": 6}).status_code == 200


def test_each_sequence_counts_as_a_request(keyed_url: str) -> None:
    reply = post(keyed_url, "minute-1", {"prompt": ["a", "b", "c"], "n": 5, "max_tokens": 1})
    assert reply.status_code == 200
    assert reply.headers["x-ratelimit-remaining-requests"] == "5"
    late = post(keyed_url, "minute-1", {"prompt": "a", "n": 7, "max_tokens": 1})
    assert (late.status_code, late.json()["error"]["type"]) == (429, "requests")
    large = post(keyed_url, "minute-1", {"prompt": ["a"] * 21, "max_tokens": 1})
    assert (large.status_code, large.json()["error"]["param"]) == (400, "prompt")
    assert "21 sequences: exceeds the 20 requests per minute" in large.json()["error"]["message"]


def test_a_key_may_only_stand_back(keyed_url: str) -> None:
    name = 'admission_rejections_total{model_name="fake",reason="priority"'
    before = metric(keyed_url, name)
    reply = post(keyed_url, "blue-1", {**ONE, "priority": -1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")
    assert metric(keyed_url, name) == before + 1
    assert post(keyed_url, "blue-1", {**ONE, "priority": 1}).status_code == 200
