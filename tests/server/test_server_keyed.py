"""A live server with a file of keys: tenants, limits, what is logged, and new keys at SIGHUP."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.keyed import Keyed, keyed_server, seconds_of


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed_server(tmp_path_factory.mktemp("keys"), "--step-seconds", "0.002") as server:
        yield server


def test_no_tenant_hits_what_another_has_cached(keyed: Keyed) -> None:
    assert keyed.cached_tokens("red-1") == 0
    assert keyed.cached_tokens("red-1") > 0
    assert keyed.cached_tokens("red-2") > 0, "keys of one tenant share"
    assert keyed.cached_tokens("blue-1") == 0
    assert keyed.cached_tokens("blue-1") > 0


def test_a_crafted_salt_reaches_no_other_tenant(keyed: Keyed) -> None:
    prompt = "another secret"
    assert keyed.cached_tokens("red-1", "mine", prompt) == 0
    for salt in ("mine", "3:redmine", "redmine", "3:red", ":redmine", None):
        assert keyed.cached_tokens("blue-1", salt, prompt) == 0
    assert keyed.cached_tokens("red-2", "mine", prompt) > 0


def test_openais_client_knows_the_errors(keyed: Keyed) -> None:
    with keyed.client("wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    headers = {"Authorization": "Bearer red-1"}
    for path in ("/cluster", "/debug/memory"):
        reply = httpx.get(keyed.url + path, headers=headers)
        assert (reply.status_code, httpx.get(keyed.url + path).status_code) == (403, 401)
        operator = httpx.get(keyed.url + path, headers={"Authorization": "Bearer ops-1"})
        assert operator.status_code == 200


def test_tokens_are_settled_and_exhausted_ones_are_429(keyed: Keyed) -> None:
    one = keyed.post("small-1", prompt="x" * 100, max_tokens=500)
    assert one.status_code == 200
    assert one.headers["x-ratelimit-limit-tokens"] == "1000"
    assert 400 <= int(one.headers["x-ratelimit-remaining-tokens"]) < 900
    large = keyed.post("small-1", prompt="x" * 100, max_tokens=950)
    assert (large.status_code, large.json()["error"]["param"]) == (400, "max_tokens")
    assert "at most 900 tokens" in large.json()["error"]["message"]
    refused = keyed.post("small-1", prompt="x" * 100, max_tokens=850)
    assert refused.status_code == 429
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    stopped = keyed.post("small-1", prompt="x" * 100, max_tokens=200, stop=list("aeiourstln"))
    used = stopped.json()["usage"]["total_tokens"]
    ended = keyed.line("request_ended", tenant="small", id=stopped.json()["id"])
    assert used < 300
    assert ended["prompt_tokens"] + ended["output_tokens"] == used
    left = keyed.post("small-1", prompt="x", max_tokens=1, temperature=-1.0)
    assert left.status_code == 400
    # 1000 - 600 - used, and some that came back while time passed.
    remaining = int(left.headers["x-ratelimit-remaining-tokens"])
    assert remaining >= 1000 - 600 - used
    assert left.headers["x-ratelimit-remaining-requests"] == "0"
    many = keyed.post("small-1", prompt="x")
    assert (many.status_code, many.json()["error"]["type"]) == (429, "requests")


def test_streams_say_what_a_key_has_left_too(keyed: Keyed) -> None:
    body = {"prompt": "streamed", "max_tokens": 12, "stream": True}
    headers = {"Authorization": "Bearer slow-1"}
    url = f"{keyed.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        told = dict(reply.headers)
        assert reply.read().rstrip().endswith(b"[DONE]")
    for unit, limit in (("requests", 2), ("tokens", 60)):
        assert told[f"x-ratelimit-limit-{unit}"] == str(limit)
        left = int(told[f"x-ratelimit-remaining-{unit}"])
        assert left == limit or told[f"x-ratelimit-reset-{unit}"] != "0s"
        # One comes back in so many seconds, whenever the head was written.
        each, reset = 60 / limit, seconds_of(told[f"x-ratelimit-reset-{unit}"])
        assert each * (limit - left - 1) < reset <= each * (limit - left)


def test_the_log_tells_of_requests_and_never_of_their_text_or_key(keyed: Keyed) -> None:
    reply = keyed.post("blue-1", prompt="a text of mine", max_tokens=3)
    line = keyed.line("request_ended", id=reply.json()["id"])
    assert line["seconds"] > 0
    told = {name: line[name] for name in ("tenant", "status", "model", "path")}
    expected = {"tenant": "blue", "status": 200, "model": "fake", "path": "/v1/completions"}
    assert told == expected
    counts = (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"])
    assert counts == (len("a text of mine"), 3, 0)
    httpx.get(f"{keyed.url}/v1/models", headers={"Authorization": "Bearer guessed-key"})
    assert keyed.line("key_refused", path="/v1/models")["status"] == 401
    said = json.dumps(keyed.seen)
    for secret in ("a text of mine", "blue-1", "guessed-key", reply.json()["choices"][0]["text"]):
        assert secret not in said


def test_a_client_that_leaves_a_stream_pays_for_what_it_got(keyed: Keyed) -> None:
    body = {"prompt": "leaving", "max_tokens": 4000, "stream": True}
    headers = {"Authorization": "Bearer red-1"}
    url = f"{keyed.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as reply:
        lines = reply.iter_lines()
        answer_id = json.loads(next(lines).removeprefix("data: "))["id"]
    ended = keyed.line("request_ended", id=answer_id)
    assert ended["status"] == 499
    assert ended["prompt_tokens"] == len("leaving")
    assert 0 < ended["output_tokens"] < 4000


def test_a_beam_search_pays_for_all_its_beams(keyed: Keyed) -> None:
    body = {"prompt": "b", "max_tokens": 6, "use_beam_search": True, "ignore_eos": True}
    reply = keyed.post("red-1", **body, best_of=4)
    assert reply.json()["usage"]["completion_tokens"] == 6, "one answer"
    assert keyed.line("request_ended", id=reply.json()["id"])["output_tokens"] == 1 + 4 * 5


def test_statistics_come_while_there_is_traffic(keyed: Keyed) -> None:
    keyed.post("red-1", prompt="busy", max_tokens=500)
    line = keyed.line("statistics", running=1)
    assert line["waiting"] == 0
    assert line["output_tokens_per_second"] >= 0
    assert {"prompt_tokens_per_second", "kv_usage"} <= line.keys()


def test_new_keys_are_taken_at_a_signal_and_wrong_ones_are_not(tmp_path: Path) -> None:
    with keyed_server(tmp_path) as server:
        assert server.post("new-1", prompt="x").status_code == 401
        server.key_file.write_text('[[keys]]\nname = "new"\nkey = "new-1"\n')
        server.process.send_signal(signal.SIGHUP)
        assert server.line("keys_read")["keys"] == 1
        assert server.post("new-1", prompt="x").status_code == 200
        assert server.post("red-1", prompt="x").status_code == 401
        server.key_file.write_text('[[keys]]\nname = "new"\n')
        server.process.send_signal(signal.SIGHUP)
        assert "keys[0].key" in server.line("keys_not_read")["problem"]
        assert server.post("new-1", prompt="x").status_code == 200
