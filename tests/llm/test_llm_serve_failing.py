"""``kvell serve`` with models that give NaN: the request fails, with words, and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.llm.broken_models import POISON
from tests.llm.servers import PATIENCE_SECONDS, Served

pytestmark = pytest.mark.xdist_group("several_server")
SHARED = [(7 * i) % 70 for i in range(40)]
WORDS = "not numbers"


@pytest.fixture(scope="module")
def url(several_server: Served) -> Iterator[str]:
    found = several_server.url
    before = instance(found)
    yield found
    audit = httpx.get(f"{found}/debug/audit", timeout=60).json()
    assert audit["clean"], audit
    assert instance(found) == before, "the instance was restarted"


def instance(url: str) -> tuple[int, int]:
    [one] = httpx.get(f"{url}/cluster").json()["instances"]
    return one["pid"], one["restarts"]


def body(prompt: list[int], model: str = "poisoned", **more: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return asked | {"ignore_eos": True, "return_token_ids": True} | more


def post(url: str, asked: dict[str, Any], path: str = "completions") -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=asked, timeout=PATIENCE_SECONDS)


def tokens_of(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def check_failed(reply: httpx.Response) -> None:
    assert reply.status_code == 500, reply.text
    error = reply.json()["error"]
    assert error["type"] == "server_error"
    assert WORDS in error["message"]


def test_a_model_that_gives_nan_fails_alone_while_another_streams(url: str) -> None:
    asked = body(SHARED, max_tokens=150)
    undisturbed = tokens_of(post(url, asked))
    streamed: list[int] = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=asked | {"stream": True}, timeout=PATIENCE_SECONDS
    ) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        streamed += json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        for more in (
            {},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 1.0, "seed": 5, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
            {"logprobs": 3},
            {"repetition_penalty": 1.2, "min_tokens": 3},
        ):
            check_failed(post(url, body([3, 4, 5], "broken", **more)))
        check_failed(post(url, {"model": "broken", "input": [3, 4, 5]}, "embeddings"))
        for line in lines:
            for choice in json.loads(line[6:])["choices"]:
                streamed += choice.get("token_ids") or []
    assert streamed == undisturbed
    reply = post(url, {"model": "poisoned", "input": [3, 4, 5]}, "embeddings")
    assert reply.status_code == 200


def test_a_stream_fails_with_words_too(url: str) -> None:
    """The first token is the poison itself, so the second cannot be computed."""
    asked = body([1, 2, 3], logit_bias={str(POISON): 100.0})
    check_failed(post(url, asked))
    reply = post(url, asked | {"stream": True})
    if reply.status_code == 200:  # the first token had gone out before the next step failed
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        told = [json.loads(event) for event in events if event != "[DONE]"]
        assert "output position 1" in told[-1]["error"]["message"]
    else:
        check_failed(reply)
    reply = post(url, body([1, POISON], stream=True))
    if reply.status_code == 200:  # the request was accepted before its step failed
        assert "at output position 0" in reply.text and "[DONE]" not in reply.text
    else:
        check_failed(reply)


def test_vectors_and_scores_are_no_null(url: str) -> None:
    asked = {"model": "poisoned", "input": [[1, 2, 3], [1, POISON]]}
    check_failed(post(url, asked, "embeddings"))
    check_failed(post(url, body([1, POISON, 2], prompt_logprobs=2)))
