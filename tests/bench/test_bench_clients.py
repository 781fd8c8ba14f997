"""Conversations of clients that others wrote, sent again: each answer has the recorded form.

``clients/NAME.json`` has what a client sent in its checks to this same model, and the client's
version.  Clients took these answers, except answers that were cut at their last token where the
client wants a whole one.  Fields and types of answers are compared, their texts are not.  ADR 33
names the commit of the clients' checks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm.servers import Served, serving

pytestmark = pytest.mark.xdist_group("client_server")
RECORDED = sorted(Path(__file__).with_name("clients").glob("*.json"))
FEW = 4
"""Exchanges of a client that are sent in the fast suite: one of each path first."""
LONG_TEXT = "$repeat"
"""The key of a text that is many times another, in a recorded body."""


@pytest.fixture(scope="module")
def server(shallow_path: Path) -> Iterator[Served]:
    flags = ["--kv-memory", "128MiB", "--dtype", "float32"]
    with serving(shallow_path.parent, *flags) as served:
        yield served


LIMITS = {"max_tokens", "max_completion_tokens"}


def exchanges(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["exchanges"]
    return found


def whole(value: Any) -> Any:
    """A recorded body with its long texts."""
    if isinstance(value, dict):
        if LONG_TEXT in value:
            return str(value[LONG_TEXT]) * int(value["times"])
        return {name: whole(one) for name, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def form(value: Any) -> Any:
    """Fields and types of an answer; of a list one item of each form."""
    if isinstance(value, dict):
        return {name: form(one) for name, one in sorted(value.items())}
    if isinstance(value, list):
        forms: list[Any] = []
        for one in map(form, value):
            if one not in forms:
                forms.append(one)
        return forms
    if value is None or isinstance(value, bool | str):
        return type(value).__name__
    return "number"


def fits(found: Any, expected: Any) -> bool:
    """Whether a form is the recorded one; null stands for any value on either side."""
    if "NoneType" in (found, expected):
        return True
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(fits(found[name], one) for name, one in expected.items())
        )
    if isinstance(expected, list):
        return isinstance(found, list) and all(
            any(fits(one, other) for other in expected) for one in found
        )
    return bool(found == expected)


def answer_form(response: httpx.Response) -> Any:
    """The form of a whole answer, or the forms of a stream's events."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return form(response.json())
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    return {"events": form(events), "ends": data[-1:] == ["[DONE]"]}


def send(server: Served, exchange: dict[str, Any]) -> httpx.Response:
    url = f"{server.url}{exchange['path']}"
    body = whole(exchange["body"])
    if exchange["path"].endswith("completions") and not body.keys() & LIMITS:
        body["max_tokens"] = 64  # else a small model writes until its context is full
    return httpx.post(url, json=body, headers=exchange["headers"], timeout=120)


def check(server: Served, chosen: list[dict[str, Any]]) -> None:
    for exchange in chosen:
        response = send(server, exchange)
        assert response.status_code == exchange["status"], (exchange["body"], response.text)
        found = answer_form(response)
        assert fits(found, exchange["answer"]), (exchange["path"], found, exchange["answer"])


def first_of_each_kind(path: Path) -> list[dict[str, Any]]:
    kinds: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for exchange in exchanges(path):
        streams = bool(exchange["body"].get("stream"))
        kinds.setdefault((exchange["path"], exchange["status"], streams), exchange)
    return list(kinds.values())[:FEW]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_client_gets_answers_of_the_form_that_it_accepted(path: Path, server: Served) -> None:
    check(server, first_of_each_kind(path))


@pytest.mark.long
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_whole_conversations(path: Path, server: Served) -> None:
    check(server, exchanges(path))
