"""Traces of a live server at a live collector: every route, streamed or not, and no text."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.server.tracing.collector import DEADLINE_SECONDS, Collector, attributes, collecting
from tests.server.tracing.records import PARENT

SCRIPT = Path(__file__).with_name("traced_server.py")
KEY = {"Authorization": "Bearer the-key-of-all"}
SECRET = "a secret of the client's"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 40}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 40},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": SECRET, "max_output_tokens": 40},
    "/v1/messages": CHAT | {"model": "fake"},
}
SAMPLING = {"temperature": 0.5, "top_p": 0.75}
LONG = {"prompt": SECRET, "max_tokens": 4000, "stream": True}


class Traced:
    """A server process, its address, and the collector of its traces."""

    def __init__(self, process: "subprocess.Popen[str]", there: Collector) -> None:
        assert process.stdout is not None
        self.process, self.there = process, there
        self.url = process.stdout.readline().split()[0]

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=KEY | headers, timeout=60)

    def trace(self, reply: httpx.Response) -> tuple[Span, list[Span]]:
        return self.there.trace(answer_id(reply))


@contextlib.contextmanager
def traced_server(
    url: str, *instance: str, **environment: str
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, str(SCRIPT), url, *instance]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with (
        collecting() as there,
        traced_server(there.url, "--step-seconds", "0.002", OTEL_BSP_SCHEDULE_DELAY="20") as server,
    ):
        yield Traced(server, there)


def answer_id(reply: httpx.Response) -> str:
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["id"])
    first = next(line for line in reply.text.splitlines() if line.startswith("data: "))
    event = json.loads(first.removeprefix("data: "))
    return str((event.get("response") or event.get("message") or event)["id"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_route_is_traced_streamed_or_not(traced: Traced, path: str, stream: bool) -> None:
    reply = traced.post(path, BODIES[path] | SAMPLING | {"stream": stream}, traceparent=PARENT)
    assert reply.status_code == 200
    visit, below = traced.trace(reply)
    told = attributes(visit)
    assert (visit.name, visit.kind) == (f"POST {path}", Span.SPAN_KIND_SERVER)
    assert (visit.trace_id.hex(), visit.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "fake"
    asked = [told[f"gen_ai.request.{n}"] for n in ("temperature", "top_p", "max_tokens", "n")]
    assert asked == [0.5, 0.75, 40, 1]
    assert told["gen_ai.usage.input_tokens"] >= len(SECRET)
    assert told["gen_ai.usage.output_tokens"] == 40
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["kvell.instance"], told["kvell.retries"]) == ("mixed-0", 0)
    assert visit.status.code == Status.STATUS_CODE_UNSET
    assert [span.name for span in below] == ["queue", "prefill", "decode"]


def test_times_agree_with_each_other(traced: Traced) -> None:
    visit, below = traced.trace(traced.post("/v1/completions", {"prompt": "x", "max_tokens": 40}))
    told = attributes(visit)
    queue, prefill, decode = below
    assert visit.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= visit.end_time_unix_nano
    first = prefill.end_time_unix_nano - queue.start_time_unix_nano
    assert told["gen_ai.latency.time_to_first_token"] == pytest.approx(first / 1e9, abs=1e-6)
    whole = visit.end_time_unix_nano - visit.start_time_unix_nano
    assert told["gen_ai.latency.e2e"] == pytest.approx(whole / 1e9, abs=1e-6)
    assert abs(visit.end_time_unix_nano - time.time_ns()) < DEADLINE_SECONDS * 1e9


def test_cached_tokens_and_several_answers_are_told(traced: Traced) -> None:
    body = {"prompt": "again and again", "max_tokens": 2}
    traced.post("/v1/completions", body)
    visit, below = traced.trace(traced.post("/v1/completions", body | {"n": 3}))
    told = attributes(visit)
    assert told["kvell.cached_tokens"] == len("again and again") - 1
    assert (told["gen_ai.request.n"], told["gen_ai.usage.output_tokens"]) == (3, 6)
    assert told["gen_ai.response.finish_reasons"] == ["length"] * 3
    choices = [(attributes(span)["kvell.choice"], span.name) for span in below]
    assert choices == [(n, name) for n in range(3) for name in ("queue", "prefill", "decode")]


def test_without_a_traceparent_a_trace_begins(traced: Traced) -> None:
    visits = [
        traced.trace(traced.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0]
        for _ in range(2)
    ]
    assert [visit.parent_span_id for visit in visits] == [b"", b""]
    assert len({visit.trace_id for visit in visits}) == 2


def test_a_client_that_leaves_a_stream_is_told(traced: Traced) -> None:
    url = f"{traced.url}/v1/completions"
    with httpx.stream("POST", url, json=LONG, headers=KEY) as reply:
        first = next(line for line in reply.iter_lines() if line)
    visit, below = traced.there.trace(json.loads(first.removeprefix("data: "))["id"])
    told = attributes(visit)
    assert (told["http.response.status_code"], told["error.type"]) == (499, "499")
    assert visit.status.code == Status.STATUS_CODE_ERROR
    assert told["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert 0 < told["gen_ai.usage.output_tokens"] < 4000
    assert told["kvell.instance"] == "mixed-0"
    assert [span.name for span in below] == ["queue", "prefill", "decode"]


@pytest.mark.parametrize(
    ("path", "body", "status", "reasons"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": -1.0}, 400, None),
        ("/v1/completions", {"prompt": "x", "model": SECRET}, 404, None),
        ("/v1/completions", {"prompt": [2]}, 400, ["refused"]),
        ("/v1/completions", LONG | {"stream": False, "deadline_seconds": 0.1}, 408, ["cancelled"]),
    ],
)
def test_a_request_that_cannot_be_served_is_told_with_its_status(
    traced: Traced, path: str, body: dict[str, Any], status: int, reasons: list[str] | None
) -> None:
    trace_id = os.urandom(16).hex()
    reply = traced.post(path, body, traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
    assert reply.status_code == status

    def visits() -> list[Span]:
        servers = [s for s in traced.there.spans if s.kind == Span.SPAN_KIND_SERVER]
        return [span for span in servers if span.trace_id.hex() == trace_id]

    traced.there.until(lambda: bool(visits()))
    told = attributes(visits()[0])
    assert told["http.response.status_code"] == status
    assert told.get("gen_ai.response.finish_reasons") == reasons
    assert "error.type" not in told


def test_no_text_and_no_key_is_in_what_was_sent(traced: Traced) -> None:
    """Of this and all other requests of this server."""
    replies = [traced.post(path, body) for path, body in BODIES.items()]
    said = [text for reply in replies for text in texts(reply.json())]
    assert [len(text) for text in said] == [40] * len(BODIES)
    for reply in replies:
        traced.trace(reply)
    guess = {"Authorization": "Bearer a-guessed-key"}
    assert httpx.get(f"{traced.url}/v1/{SECRET}", headers=guess).status_code == 401
    assert httpx.get(f"{traced.url}/v1/{SECRET}", headers=KEY).status_code == 404
    traced.there.until(lambda: any(span.name == "GET" for span in traced.there.spans))
    sent = b"".join(traced.there.bodies)
    assert b"gen_ai.usage.output_tokens" in sent
    for text in (SECRET, "secret", "the-key-of-all", "a-guessed-key", *said):
        assert text.encode() not in sent


def texts(body: Any) -> list[str]:
    if isinstance(body, list):
        return [text for part in body for text in texts(part)]
    if not isinstance(body, dict):
        return []
    own = [body[name] for name in ("text", "content") if isinstance(body.get(name), str)]
    return own + [text for part in body.values() for text in texts(part)]


def test_pages_of_operators_are_not_traced(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/cluster"):
        assert httpx.get(traced.url + path, headers=KEY).status_code == 200
    traced.trace(traced.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
    routes = {attributes(span).get("http.route", "/v1/") for span in traced.there.spans}
    assert all(route.startswith("/v1/") for route in routes)


def test_another_attempt_after_an_instances_death_is_told() -> None:
    with (
        collecting() as there,
        traced_server(
            there.url, "--step-seconds", "0.002", OTEL_BSP_SCHEDULE_DELAY="20"
        ) as process,
    ):
        server = Traced(process, there)
        body = LONG | {"max_tokens": 500}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=KEY) as reply:
            lines = (line for line in reply.iter_lines() if line)
            answer = json.loads(next(lines).removeprefix("data: "))["id"]
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children), signal.SIGKILL)
            assert list(lines)[-1] == "data: [DONE]"
        visit, _ = there.trace(answer)
        told = attributes(visit)
        assert (told["kvell.retries"], told["gen_ai.usage.output_tokens"]) == (1, 500)
        assert visit.status.code == Status.STATUS_CODE_UNSET


def test_what_was_not_sent_yet_is_sent_at_the_end() -> None:
    with collecting() as there:
        with traced_server(there.url, OTEL_BSP_SCHEDULE_DELAY="3600000") as process:
            server = Traced(process, there)
            reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert there.bodies == []
        assert process.returncode == 0
        assert [span.name for span in server.trace(reply)[1]] == ["queue", "prefill", "decode"]


def test_a_collector_that_is_away_is_no_reason_to_fail() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    quick = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"}
    with collecting() as unused, traced_server(f"http://127.0.0.1:{port}", **quick) as process:
        server = Traced(process, unused)
        assert process.stderr is not None
        for _ in range(20):
            reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert reply.status_code == 200
        events = []
        while "tracing_problem" not in events:
            events.append(json.loads(process.stderr.readline())["event"])
        process.terminate()
        _, rest = process.communicate(timeout=DEADLINE_SECONDS)
        later = [json.loads(line)["event"] for line in rest.splitlines()]
    assert process.returncode == 0
    assert "tracing_problem" not in later
