"""Ollama's embeddings: the vectors of ``/v1/embeddings``, long texts that are cut, and refusals."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from kvell.server.text.text_encoder import form_cut_at_end
from kvell.testing.instance import VECTOR_SIZE

pytestmark = pytest.mark.xdist_group("fake_server")
LONG = "word " * 2000
"""A text that is longer than the context of 4096 tokens."""


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def official(server_url: str) -> ollama.Client:
    return ollama.Client(server_url)


def openai_vectors(client: httpx.Client, **body: Any) -> list[list[float]]:
    reply = client.post("/v1/embeddings", json={"model": "fake", **body})
    assert reply.status_code == 200, reply.text
    return [each["embedding"] for each in reply.json()["data"]]


def test_vectors_are_those_of_openais_route(client: httpx.Client, official: ollama.Client) -> None:
    texts = ["a page", "a boat"]
    answer = official.embed("fake:latest", texts, keep_alive="5m", options={"num_ctx": 1 << 20})
    expected = openai_vectors(client, input=texts)
    assert np.allclose(answer.embeddings, expected, atol=1e-6)
    assert answer.model == "fake:latest"
    assert answer.prompt_eval_count == len("a pagea boat")
    assert (answer.total_duration or 0) > 0 == answer.load_duration
    assert official.embed("fake", "a page").embeddings == [answer.embeddings[0]]
    assert official.embeddings("fake", "a page").embedding == answer.embeddings[0]


def test_vectors_are_cut_where_the_model_was_trained_for_it(
    client: httpx.Client, official: ollama.Client
) -> None:
    cut = official.embed("fake", "a page", dimensions=4).embeddings
    assert np.allclose(cut, openai_vectors(client, input="a page", dimensions=4), atol=1e-6)
    assert len(official.embed("fake", "a page", dimensions=0).embeddings[0]) == VECTOR_SIZE
    with pytest.raises(ollama.ResponseError, match="dimensions=3: is not a size") as error:
        official.embed("fake", "a page", dimensions=3)
    assert error.value.status_code == 400


def test_long_texts_are_cut_at_their_ends_unless_the_client_forbids_it(
    client: httpx.Client, official: ollama.Client
) -> None:
    answer = official.embed("fake", ["a", LONG])
    assert answer.prompt_eval_count == 1 + 4096
    assert np.allclose(answer.embeddings[1:], openai_vectors(client, input=LONG[:4096]), atol=1e-6)
    assert official.embeddings("fake", LONG).embedding == answer.embeddings[1]
    with pytest.raises(ollama.ResponseError, match="input=") as error:
        official.embed("fake", LONG, truncate=False)
    assert error.value.status_code == 400


def test_a_token_that_ends_a_text_stays_when_the_text_is_cut() -> None:
    ids = np.array([5, 6, 7, 8, 2], np.int32)
    form = form_cut_at_end(frozenset({2}))
    assert form.kept_of(ids, 3).tolist() == [5, 6, 2]
    assert form.kept_of(ids, 5).tolist() == [5, 6, 7, 8, 2]
    assert form.kept_of(ids[:4], 3).tolist() == [5, 6, 7]
    assert ids.tolist() == [5, 6, 7, 8, 2]


@pytest.mark.parametrize("given", ["", [], None])
def test_nothing_has_no_vectors(client: httpx.Client, given: Any) -> None:
    reply = client.post("/api/embed", json={"model": "fake", "input": given})
    assert (reply.status_code, reply.json()) == (200, {"model": "fake", "embeddings": []})
    old = client.post("/api/embeddings", json={"model": "fake", "prompt": given or ""})
    assert (old.status_code, old.json()) == (200, {"embedding": []})


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("embed", {"input": [1, 2]}, "input[0]: "),
        ("embed", {"input": ["a", ""]}, "input="),
        ("embed", {"input": "a", "dimensions": -1}, "dimensions: "),
        ("embed", {"input": "a", "options": {"mirostat": 2}}, "options.mirostat=2: is not served"),
        ("embeddings", {"prompt": ["a"]}, "prompt: "),
        ("embeddings", {"prompt": "\x02"}, "prompt=…: can never fit"),
    ],
)
def test_refusals_name_the_field(
    client: httpx.Client, path: str, body: dict[str, Any], text: str
) -> None:
    reply = client.post(f"/api/{path}", json={"model": "fake", **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"].startswith(text)
