"""The map's routes on a real app: live figures, many viewers, and the operators' key."""

import base64
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.server.api.routes.cluster import sections_of
from kvell.server.map.page import make_page
from kvell.vocabulary import RequestId
from tests.server.map.conftest import StartMap

KEY = "the-operators-key-of-this-test"


def shown(url: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.get(f"{url}/debug/pages", headers=headers)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def column(instance: dict[str, Any], name: str) -> list[int]:
    kind = "<i2" if name == "group" else "<u4"
    content = base64.b64decode(instance["pages"]["columns"][name])
    numbers: list[int] = np.frombuffer(content, kind).tolist()
    return numbers


def complete(url: str, prompt: str, max_tokens: int, salt: str | None = None) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    body |= {} if salt is None else {"cache_salt": salt}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@contextlib.contextmanager
def running_request(url: str, prompt: str, max_tokens: int = 3000) -> Iterator[None]:
    """A request that has its first token and goes on until the context ends."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()  # kept, since its end would be the stream's
        next(lines)
        yield


def until(url: str, condition: Any, seconds: float = 10.0) -> dict[str, Any]:
    """What is shown once a condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        body = shown(url)
        if condition(body):
            return body
        time.sleep(0.05)
    raise AssertionError("it was never shown")


def num_used(body: dict[str, Any]) -> int:
    return sum(sum(column(instance, "used")) for instance in body["instances"])


def is_idle(body: dict[str, Any]) -> bool:
    return body["requests"]["running"] == 0 and num_used(body) == 0


def test_the_page_is_served_with_its_policy(map_url: str) -> None:
    answer = httpx.get(f"{map_url}/")
    page = make_page()
    assert answer.status_code == 200 and answer.content == page.html
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in page.headers.items():
        assert answer.headers[name] == value


def test_every_instance_shows_every_large_page(map_url: str) -> None:
    body = until(map_url, is_idle)
    assert [one["id"] for one in body["instances"]] == ["mixed-0", "mixed-1"]
    for one in body["instances"]:
        assert one["state"] == "serving"
        assert [g["kind"] for g in one["pages"]["groups"]] == ["full", "sliding", "state"]
        for name in ("group", "used", "cached", "age"):
            assert len(column(one, name)) == 400
        assert sum(one["stats"]["bytes"][n] for n in ("kv_used", "kv_cached", "kv_free")) > 0


def test_pages_are_used_while_a_request_runs_and_cached_afterwards(map_url: str) -> None:
    until(map_url, is_idle)
    with running_request(map_url, "pages come and go " * 30):
        body = until(map_url, lambda body: num_used(body) > 10)
        (row,) = body["requests"]["rows"]
        assert row["state"] == "running" and row["prompt_tokens"] == 540
        assert row["ttft_seconds"] > 0 and row["output_tokens"] >= 1
        assert set(body["requests"]) == {"running", "waiting", "rows", "idle_wait"}
        (holder,) = [one for one in body["instances"] if sum(column(one, "used"))]
        assert holder["id"] == row["instance"]
    body = until(map_url, is_idle)
    assert sum(sum(column(one, "cached")) for one in body["instances"]) > 10


def test_a_large_page_names_the_requests_that_own_it(map_url: str) -> None:
    until(map_url, is_idle)
    with running_request(map_url, "whose page is this " * 30):
        body = until(map_url, lambda body: num_used(body) > 10)
        (row,) = body["requests"]["rows"]
        (holder,) = [one for one in body["instances"] if sum(column(one, "used"))]
        large = next(i for i, used in enumerate(column(holder, "used")) if used)
        told = httpx.get(f"{map_url}/debug/pages/{holder['id']}/{large}").json()
        assert told["large_page"] == large and told["used"] > 0
        assert [owner["id"] for owner in told["owners"]] == [row["id"]]
    until(map_url, is_idle)


def test_misses_have_their_reasons(map_url: str) -> None:
    until(map_url, is_idle)
    prompt = "why did this prefix miss " * 40
    for salt in ("one tenant", "another tenant"):
        for _ in range(4):  # both instances see it
            complete(map_url, prompt, 2, salt)
    body = until(map_url, is_idle)
    reasons = {m["reason"] for one in body["instances"] for m in one["pages"]["misses"]}
    assert {"never_seen", "other_salt"} <= reasons
    assert "tenant" not in httpx.get(f"{map_url}/debug/pages").text


def test_nothing_that_was_asked_or_answered_is_shown(map_url: str) -> None:
    until(map_url, is_idle)
    with running_request(map_url, "unspeakable " * 40):
        until(map_url, lambda body: body["requests"]["running"] == 1)
        assert "unspeakable" not in httpx.get(f"{map_url}/debug/pages").text
    until(map_url, is_idle)


def history(url: str, after: float = 0.0) -> dict[str, Any]:
    answer = httpx.get(f"{url}/debug/history", params={"after": after})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_server_has_a_history_that_nobody_watched(map_url: str) -> None:
    """Rows come once a second, and each only once."""
    deadline = time.monotonic() + 30
    while len((body := history(map_url))["rows"]) < 3:
        assert time.monotonic() < deadline, body
        time.sleep(0.1)
    times = [row[0] for row in body["rows"]]
    assert body["fields"][0] == "at_seconds" and times == sorted(set(times))
    assert all(later - earlier > 0.9 for earlier, later in pairwise(times))
    instances = body["rows"][-1][body["fields"].index("instances")]
    assert list(instances) == ["mixed-0", "mixed-1"]
    assert len(instances["mixed-0"]) == len(body["instance_fields"])
    assert instances["mixed-0"][body["instance_fields"].index("pool")] > 0
    assert all(row[0] > times[1] for row in history(map_url, times[1])["rows"])


def test_the_line_of_the_server_counts_tokens(map_url: str) -> None:
    complete(map_url, "tokens are counted " * 9, 30)
    body = until(map_url, lambda body: (body["server"]["output_tokens_per_second"] or 0) > 0)
    line = body["server"]
    assert line["models"] == ["fake"] and line["dtype"] == "float32"
    assert line["prompt_tokens_per_second"] > 0
    assert line["ttft_p50_seconds"] > 0 and line["tpot_p50_seconds"] > 0
    cluster = httpx.get(f"{map_url}/cluster").json()
    assert line["contract_bytes"] == cluster["contract_bytes"] > 0
    assert line["links"] == ["metrics", "docs"]
    for link in line["links"]:
        assert httpx.get(f"{map_url}/{link}").status_code == 200


def test_many_viewers_are_given_the_same_answer(map_url: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(lambda _: shown(map_url), range(64)))
    moments = {body["at_seconds"] for body in bodies}
    span = max(moments) - min(moments)
    assert len(moments) <= 2 + span / 0.2


def test_what_is_not_there_is_refused(map_url: str) -> None:
    assert httpx.get(f"{map_url}/debug/pages/nobody/0").status_code == 404
    for number in ("-1", "x", str(1 << 40)):
        assert httpx.get(f"{map_url}/debug/pages/mixed-0/{number}").status_code in (400, 422)
    beyond = httpx.get(f"{map_url}/debug/pages/mixed-0/999999").json()
    assert (beyond["group"], beyond["used"], beyond["owners"]) == (-1, 0, [])


@pytest.mark.long
def test_with_a_key_the_page_is_open_and_what_it_shows_is_not(start_map: StartMap) -> None:
    with start_map(KEY, 1, "--large-pages", "100") as url:
        assert httpx.get(f"{url}/").status_code == 200
        for path in ("/debug/pages", "/debug/history", "/debug/pages/mixed-0/0"):
            assert httpx.get(f"{url}{path}").status_code == 401
            wrong = httpx.get(f"{url}{path}", headers={"Authorization": "Bearer wrong"})
            assert wrong.status_code == 401
        told = shown(url, KEY)
        assert len(told["instances"]) == 1 and told["server"]["links"] == ["metrics", "docs"]


@pytest.mark.long
def test_a_map_of_many_pages_is_quick_beside_steps(start_map: StartMap) -> None:
    """10,000 large pages: watchers do not hold requests up."""
    with start_map("-", 1, "--large-pages", "10000", "--step-seconds", "0.005") as url:
        stop = threading.Event()
        taken: list[float] = []

        def watch() -> None:
            while not stop.is_set():
                begun = time.monotonic()
                shown(url)
                taken.append(time.monotonic() - begun)
                time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        complete(url, "many pages " * 50, 100)
        stop.set()
        watcher.join()
        assert sorted(taken)[len(taken) // 2] < 0.5


def part(inst_id: str, num_blocks: int, *, local: bool = False) -> RequestPlacementEntry:
    return RequestPlacementEntry(RequestId("r"), inst_id, num_blocks, local)


def test_debtors_say_what_creditors_lend() -> None:
    told = {
        "mixed-0": (part("mixed-0", 2, local=True), part("mixed-1", 2), part("mixed-2", 1)),
        "mixed-1": (),
        "mixed-2": (),
        "mixed-3": (part("mixed-1", 1), part("gone", 4)),
    }
    assert sections_of(told) == {
        "mixed-0": {"lent": 0, "borrowed": 3},
        "mixed-1": {"lent": 3, "borrowed": 0},
        "mixed-2": {"lent": 1, "borrowed": 0},
        "mixed-3": {"lent": 0, "borrowed": 5},
    }
