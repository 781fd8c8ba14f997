"""A live server's life: keys, death of its instance, clients that leave, full queues, its end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvell.errors import ChangeSomething
from kvell.server.run import bind
from tests.patience import until
from tests.server.lives import DEADLINE_SECONDS, StartServer, child_of

pytestmark = pytest.mark.xdist_group("fake_server")
SLOW = ("--step-seconds", "0.002", "--credits", "1")
BODY = {"model": "fake", "prompt": "hi", "max_tokens": 4000}


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvell:{name}"))


CANCELLED = 'request_success_total{finished_reason="cancelled"'
ENDED = 'request_success_total{finished_reason="length"'


@pytest.fixture(scope="module")
def slow_url(start_server: StartServer) -> Iterator[str]:
    with start_server("-", "0", *SLOW) as (url, _):
        yield url


@pytest.fixture
def slow(slow_url: str) -> str:
    """The same, once it has nothing to do."""
    until(lambda: metric(slow_url, "num_requests_running") == 0)
    until(lambda: metric(slow_url, "num_requests_waiting") == 0)
    return slow_url


def test_a_client_that_leaves_a_stream_cancels_its_request(slow: str) -> None:
    cancelled = metric(slow, CANCELLED)
    with httpx.stream("POST", f"{slow}/v1/completions", json=BODY | {"stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        assert metric(slow, "num_requests_running") == 1
    until(lambda: metric(slow, "num_requests_running") == 0)
    assert metric(slow, CANCELLED) == cancelled + 1


def test_a_client_that_leaves_before_its_answer_cancels_it_too(slow: str) -> None:
    cancelled, ended = metric(slow, CANCELLED), metric(slow, ENDED)
    for extra in ({}, {"prompt": ["a", "b"]}):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow}/v1/completions", json=BODY | extra, timeout=0.3)
        until(lambda: metric(slow, "num_requests_running") == 0)
        until(lambda: metric(slow, "num_requests_waiting") == 0)
    assert metric(slow, CANCELLED) == cancelled + 3
    assert metric(slow, ENDED) == ended


def test_a_client_that_leaves_the_waiting_line_frees_its_place(slow: str) -> None:
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{slow}/v1/completions", json=body):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow}/v1/completions", json=body, timeout=0.3)
        until(lambda: metric(slow, "num_requests_waiting") == 0)
        assert metric(slow, "num_requests_running") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_longer_than_its_deadline_is_cancelled(
    slow: str, stream: bool
) -> None:
    cancelled = metric(slow, CANCELLED)
    body = BODY | {"stream": stream, "deadline_seconds": 0.3}
    reply = httpx.post(f"{slow}/v1/completions", json=body)
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-1] if stream else reply.text)["error"]
    assert (error["type"], error["param"]) == ("timeout_error", "deadline_seconds")
    assert reply.status_code == (200 if stream else 408)
    until(lambda: metric(slow, "num_requests_running") == 0)
    assert metric(slow, CANCELLED) == cancelled + 1
    short = body | {"max_tokens": 3, "deadline_seconds": 60, "stream": False}
    assert httpx.post(f"{slow}/v1/completions", json=short).status_code == 200


def test_a_request_that_waits_beyond_its_deadline_is_never_submitted(slow: str) -> None:
    with httpx.stream("POST", f"{slow}/v1/completions", json=BODY | {"stream": True}):
        late = httpx.post(f"{slow}/v1/completions", json=BODY | {"deadline_seconds": 0.2})
        assert late.status_code == 408
        assert metric(slow, "num_requests_running") == 1
        assert metric(slow, "num_requests_waiting") == 0


def test_a_stream_survives_the_death_of_its_instance(
    start_server: StartServer,
) -> None:
    with start_server("-", "0", "--step-seconds", "0.002") as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        assert httpx.get(f"{url}/health").status_code == 200
        body = BODY | {"max_tokens": 500}
        stream = client.completions.create(**body, stream=True)  # type: ignore[call-overload]
        text = next(stream).choices[0].text
        instance = child_of(process.pid)
        os.kill(instance, signal.SIGKILL)
        text += "".join(chunk.choices[0].text for chunk in stream)
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert child_of(process.pid) != instance
        undisturbed = client.completions.create(**body)  # type: ignore[call-overload]
        assert undisturbed.choices[0].text == text
        assert undisturbed.choices[0].finish_reason == "length"
        assert metric(url, "instance_restarts_total") == 1
        assert metric(url, 'request_success_total{finished_reason="error"') == 0


def test_an_answer_that_was_not_streamed_fails_with_500(start_server: StartServer) -> None:
    with start_server("-", "0") as (url, _):
        reply = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": [1]})
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        short = BODY | {"max_tokens": 1}
        while (reply := httpx.post(f"{url}/v1/completions", json=short)).status_code != 200:
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["type"] == "service_unavailable_error"


def test_a_full_waiting_line_is_429(slow: str) -> None:
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{slow}/v1/completions", json=body):
        many = {"prompt": ["a", "b", "c"]}
        reply = httpx.post(f"{slow}/v1/completions", json=BODY | many)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "too_many_requests"
        # The prompts that had found a place must not stay behind.
        until(lambda: metric(slow, "num_requests_waiting") == 0)


def test_a_key_guards_the_api_and_nothing_else(start_server: StartServer) -> None:
    with start_server("secret", "0") as (url, _):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            reply = httpx.get(f"{url}/v1/models", headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models", headers=right).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_lets_a_running_answer_end(start_server: StartServer, number: int) -> None:
    with start_server("-", "0", "--step-seconds", "0.002") as (url, process):
        instance = child_of(process.pid)
        body = BODY | {"stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(timeout=DEADLINE_SECONDS) == 0
        assert not Path(f"/proc/{instance}").exists()


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script = Path(__file__).with_name("fake_server.py")
        command = [sys.executable, str(script), "-", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"port={port}: is in use; try --port {port + 1}\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("host", "port", "field"),
    [("127.0.0.1", 70_000, "port"), ("192.0.2.1", 0, "host"), ("no.such.host.invalid", 0, "host")],
)
def test_an_address_that_cannot_be_bound_is_named(host: str, port: int, field: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        bind(host, port)
    assert caught.value.field == field


async def _delays_small_packets(listener: socket.socket) -> bool:
    """Does a connection that asyncio accepts here wait to fill its packets?"""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket")
        accepted.set_result(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    server = await asyncio.start_server(accept, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        no_delay = await asyncio.wait_for(accepted, DEADLINE_SECONDS)
        writer.close()
        await writer.wait_closed()
    return not no_delay


def test_a_streamed_token_does_not_wait_for_the_acknowledgement_of_the_head() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert not asyncio.run(_delays_small_packets(listener))


FROZEN = """
import gc, os, sys
from kvell.testing.instance import ByteText
from kvell.server.run import ServeOptions, Texts, serve

def announce(url):
    print(gc.get_freeze_count(), flush=True)
    os._exit(0)  # the instance ends with its line

serve(sys.argv[1:], Texts.of(ByteText()), ServeOptions(port=0), announce)
"""


def test_what_was_made_for_the_start_is_not_collected_again() -> None:
    instance = Path(__file__).parents[1] / "fleet" / "fake_instance.py"
    command = [sys.executable, "-c", FROZEN, sys.executable, str(instance), "--socket-fd"]
    said = subprocess.check_output([*command, "{socket_fd}"], timeout=60)
    assert int(said) > 10_000


ENDED_AT_ONCE = """
import os, signal, sys
from kvell.testing.instance import ByteText
from kvell.server.run import ServeOptions, Texts, serve

def announce(url):
    os.kill(os.getpid(), signal.SIGTERM)

serve(sys.argv[1:], Texts.of(ByteText()), ServeOptions(port=0), announce)
print("ended")
"""


def test_a_signal_at_the_announcement_ends_it_in_order() -> None:
    instance = Path(__file__).parents[1] / "fleet" / "fake_instance.py"
    command = [sys.executable, "-c", ENDED_AT_ONCE, sys.executable, str(instance), "--socket-fd"]
    assert subprocess.check_output([*command, "{socket_fd}"], timeout=60) == b"ended\n"


VLLM_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total"),
    *("generation_tokens_total", "request_success_total", "admission_rejections_total"),
    *("iteration_tokens_total_bucket", "time_to_first_token_seconds_bucket"),
    *("inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket"),
    *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket"),
    *("request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_max_num_generation_tokens_bucket", "request_prefill_kv_computed_tokens_bucket"),
    *("request_params_n_bucket", "request_params_max_tokens_bucket"),
    *("request_num_preemptions_bucket", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
)


def scraped_values(url: str) -> dict[str, float]:
    """Samples of a server, summed over labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_metrics_have_vllms_names(server_url: str) -> None:
    httpx.post(f"{server_url}/v1/completions", json=BODY | {"max_tokens": 5}).raise_for_status()
    values = scraped_values(server_url)
    missing = [name for name in VLLM_NAMES if f"kvell:{name}" not in values]
    assert missing == []
    assert values["process_resident_memory_bytes"] > 0


def test_a_scrape_counts_what_was_served_in_between(server_url: str) -> None:
    before = scraped_values(server_url)
    body = BODY | {"max_tokens": 5, "n": 2}
    httpx.post(f"{server_url}/v1/completions", json=body).raise_for_status()
    after = scraped_values(server_url)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["kvell:generation_tokens_total"] == 10
    assert grown["kvell:request_success_total"] == 2
    assert grown["kvell:time_to_first_token_seconds_count"] == 2
    assert grown["kvell:inter_token_latency_seconds_count"] == 8
    assert grown["kvell:request_generation_tokens_sum"] == 10
    assert grown["kvell:request_params_n_sum"] == 2
    assert grown["kvell:request_max_num_generation_tokens_sum"] == 5
    e2e, first = "kvell:e2e_request_latency_seconds_sum", "kvell:time_to_first_token_seconds_sum"
    assert grown[e2e] > grown[first] > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)],
)
def test_every_error_has_openais_shape(
    server_url: str, method: str, path: str, status: int
) -> None:
    reply = httpx.request(method, server_url + path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 1}'])
def test_a_body_that_is_no_request_is_400(server_url: str, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server_url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_unknown_length_is_bounded_too(server_url: str) -> None:
    pieces = (b"x" * 10_000 for _ in range(11))
    reply = httpx.post(f"{server_url}/v1/completions", content=pieces)
    assert reply.status_code == 413
