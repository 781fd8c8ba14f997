"""``kvell serve`` while a client sends grammars that explode: the others notice nothing."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.llm.servers import PATIENCE_SECONDS

pytestmark = pytest.mark.xdist_group("packaged_server")
ISSUE = "start: A\nA: /.*d.{15}/ & /.*r.{14}/ & ~/.*0.{13}/"
LONGER = "start: A\nA: /.*d.{18}/ & /.*r.{17}/ & ~/.*0.{16}/"
FUEL = "start: A\nA: /.*a.{14}/ & /.*b.{15}/ & ~/.*c.{16}/"
PARTS = "start: A\nA: " + " & ".join(f"/(.*[{chr(97 + i)}].*){{3}}/" for i in range(12))
WHILE_IT_COMPILES = 5
"""Tokens of another stream; one to two may be under way when a loop stops."""
GOOD = {"guided_regex": "[a-z ]{8,40}", "max_tokens": 8}


class Listener:
    """Another client's stream, whose answer follows a grammar as well."""

    def __init__(self, url: str) -> None:
        self.count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(url,))

    def __enter__(self) -> "Listener":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _listen(self, url: str) -> None:
        body = {"guided_regex": "(.|\n)*", "ignore_eos": True, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked(body), timeout=60) as reply:
            for line in reply.iter_lines():
                self.count += line.startswith("data: ")
                if self._is_over.is_set():
                    return


def asked(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, **body}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=asked(body), timeout=PATIENCE_SECONDS)


def bomb(grammar: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": grammar}, "max_tokens": 8}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def sampled(url: str, name: str, **labels: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"kvell:{name}" and labels.items() <= sample.labels.items()
    )


def rejected(url: str) -> float:
    return sampled(url, "admission_rejections_total", reason="grammar")


@pytest.mark.long
def test_others_get_tokens_while_a_grammar_is_found_too_complex(url: str) -> None:
    assert post(url, GOOD).status_code == 200  # the processes have started
    counted, restarts = rejected(url), sampled(url, "instance_restarts_total")
    with Listener(url) as other:
        until(lambda: other.count > 2)
        for number, grammar in enumerate((ISSUE, LONGER), start=1):
            before = other.count
            reply = post(url, bomb(grammar))
            assert other.count - before >= WHILE_IT_COMPILES
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "structured_outputs.grammar")
            assert "is too complex: it takes more than" in error["message"]
            assert rejected(url) == counted + number
    assert sampled(url, "instance_restarts_total") == restarts


def test_what_is_known_to_be_too_complex_is_refused_at_once(url: str) -> None:
    counted = rejected(url)
    for grammar, number in ((ISSUE, 1), (ISSUE, 2), (FUEL, 3), (PARTS, 4)):
        reply = post(url, bomb(grammar))
        assert reply.status_code == 400 and "is too complex" in reply.text
        assert rejected(url) == counted + number


def test_large_grammars_that_can_be_followed_are_served(url: str) -> None:
    def deep(levels: int) -> dict[str, Any]:
        if not levels:
            return {"type": "string", "pattern": "^[a-z]{1,30}$"}
        made = [{"properties": {f"k{levels}{i}": deep(levels - 1)}} for i in range(4)]
        return {"anyOf": [one | {"type": "object"} for one in made]}

    large: list[dict[str, Any]] = [
        {"guided_regex": "[a-z]{1,100000}"},
        {"guided_choice": [f"choice number {i}" for i in range(1024)]},
        {"guided_json": deep(4)},
    ]
    for body in large:
        assert post(url, body | {"max_tokens": 4}).status_code == 200


def test_a_client_that_leaves_while_its_grammar_compiles_leaves_nothing(url: str) -> None:
    other = LONGER.replace("d", "t")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=asked(bomb(other)), timeout=0.2)
    until(lambda: sampled(url, "num_requests_waiting") == 0)
    assert sampled(url, "num_requests_running") == 0
    assert post(url, GOOD).status_code == 200


def test_memory_stays_within_the_contract(url: str) -> None:
    """Of all processes, those for grammars among them."""
    page = httpx.get(f"{url}/debug/memory", timeout=60).json()
    assert page["parts"]["grammar_bytes"] > 0
    now_bytes = sum(page["now_bytes"].values())
    assert 0 < now_bytes <= page["contract_bytes"]
    assert sampled(url, "process_memory_bytes") <= page["contract_bytes"]
