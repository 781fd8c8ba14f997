"""``/v1/embeddings`` over fake instances: OpenAI's own client, its two encodings, and refusals."""

import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from kvell.errors import ChangeSomething
from kvell.server.api.bodies.completions import json_pieces
from kvell.server.api.bodies.embeddings import cut_to, embeddings_body
from kvell.server.api.schemas.embeddings import MAX_INPUTS, EmbeddingsRequest
from kvell.server.text.text_stream import Usage
from kvell.testing.instance import REFUSE_TOKEN, VECTOR_SIZE, ByteText
from tests.server.api.bodies import is_idle, metric, vector

pytestmark = pytest.mark.xdist_group("fake_server")

MODEL = "fake"


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json=fields, timeout=60)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_every_input_gets_its_vector_in_order(client: openai.OpenAI, encoding: Any) -> None:
    """Without an encoding the client asks for base64 and decodes it itself."""
    inputs = [f"text {index} " * (1 + 40 * (index % 3)) for index in range(150)]
    more = {} if encoding is None else {"encoding_format": encoding}
    reply = client.embeddings.create(model=MODEL, input=inputs, **more)
    assert (reply.object, reply.model) == ("list", MODEL)
    assert [one.index for one in reply.data] == list(range(150))
    assert {one.object for one in reply.data} == {"embedding"}
    for one, text in zip(reply.data, inputs, strict=True):
        told: Any = one.embedding
        if isinstance(told, str):
            told = np.frombuffer(base64.b64decode(told), "<f4")
        assert np.array_equal(np.asarray(told, np.float32), vector(text))
    tokens = sum(map(len, inputs))
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (tokens, tokens)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("one text", ["one text"]),
        (["a", "b"], ["a", "b"]),
        ([72, 105], [[72, 105]]),
        ([[72, 105], [7]], [[72, 105], [7]]),
    ],
)
def test_inputs_are_texts_or_token_ids(client: openai.OpenAI, given: Any, parts: Any) -> None:
    reply = client.embeddings.create(model=MODEL, input=given, encoding_format="float")
    assert len(reply.data) == len(parts)
    for one, part in zip(reply.data, parts, strict=True):
        assert np.array_equal(np.asarray(one.embedding, np.float32), vector(part))


def test_as_many_inputs_as_openai_takes(server_url: str) -> None:
    """More than wait in the server's line at once."""
    inputs = [[index % 200 + 3] for index in range(MAX_INPUTS)]
    reply = post(server_url, input=inputs, encoding_format="base64")
    assert reply.status_code == 200, reply.text[:300]
    data = reply.json()["data"]
    for one, given in zip(data, inputs, strict=True):
        told = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        assert np.array_equal(told, vector(given))


def test_cached_tokens_are_reported_and_salts_keep_apart(server_url: str) -> None:
    text = "asked for again and again"
    told = [
        post(server_url, input=text, **more).json()["usage"]["prompt_tokens_details"]
        for more in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"})
    ]
    cached = len(text) - 1
    assert [one["cached_tokens"] for one in told] == [0, cached, 0, cached]


def test_fields_that_only_accompany_a_request_are_accepted(server_url: str) -> None:
    more = {"user": "me", "priority": -1, "prompt_cache_key": "k", "encoding_format": None}
    reply = post(server_url, model=MODEL, input="text", **more)
    assert reply.status_code == 200
    assert set(reply.json()) == {"object", "data", "model", "usage"}
    assert set(reply.json()["data"][0]) == {"object", "index", "embedding"}


@pytest.mark.parametrize("size", [2, 4, VECTOR_SIZE])
def test_vectors_are_cut_to_sizes_that_the_model_was_trained_for(
    client: openai.OpenAI, size: int
) -> None:
    reply = client.embeddings.create(
        model=MODEL, input="text", dimensions=size, encoding_format="float"
    )
    told = np.asarray(reply.data[0].embedding, np.float32)
    whole = vector("text")
    assert len(told) == size
    assert np.allclose(told, whole[:size] / np.linalg.norm(whole[:size]), atol=1e-6)


LONG = "x" * 4097
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["fine", ""]}, "input"),
    ({"input": [1, "a"]}, "input[1]"),
    ({"input": [[1], "a"]}, "input[0]"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": [256]}, "input"),
    ({"input": [-1]}, "input[0]"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
    ({"input": LONG}, "input"),
    ({}, "input"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 3}, "dimensions"),
    ({"input": "a", "dimensions": 9}, "dimensions"),
    ({"input": "a", "dimensions": "two"}, "dimensions"),
    ({"input": "a", "stream": True}, "stream"),
    ({"input": "a", "pooling": "mean"}, "pooling"),
    ({"input": "a", "priority": 1 << 40}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSALS)
def test_bad_input_is_refused_by_name(server_url: str, fields: dict[str, Any], param: str) -> None:
    reply = post(server_url, **fields)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(error["message"]) < 1000


def test_the_longest_prompt_is_embedded_and_one_longer_has_openais_code(server_url: str) -> None:
    assert post(server_url, input="x" * 4096).status_code == 200
    error = post(server_url, input=["short", LONG]).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at most 4096 tokens" in error["message"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="another", input="a")
    assert caught.value.code == "model_not_found"


def test_a_refusal_by_the_instance_is_a_bad_request(server_url: str) -> None:
    reply = post(server_url, input=[[70, 71], [REFUSE_TOKEN], [72]])
    assert reply.status_code == 400
    assert "can never fit" in reply.json()["error"]["message"]


def test_what_lasts_longer_than_its_client_is_cancelled(server_url: str) -> None:
    before = cancelled(server_url)
    with pytest.raises(httpx.ReadTimeout):
        inputs = ["y" * 4090] * 24  # three rounds of 64 steps of 5 ms
        httpx.post(f"{server_url}/v1/embeddings", json={"input": inputs}, timeout=0.1)
    for _ in range(2000):
        if is_idle(server_url) and cancelled(server_url) > before:
            break
    else:
        raise AssertionError("its requests go on")


def cancelled(url: str) -> float:
    return metric(url, 'request_success_total{finished_reason="cancelled"')


def test_metrics_count_its_prompt_and_no_output(server_url: str) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    before = [metric(server_url, name) for name in names]
    assert post(server_url, input=["12345", "678"]).status_code == 200
    after = [metric(server_url, name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [8, 0, 2]


# ---------------------------------------------------------------- without a server


def test_all_inputs_together_are_bounded_by_the_bodys_bounds() -> None:
    from kvell.server.access.bodies import check_body
    from kvell.server.api.openai_api import _BOUNDS_BY_PATH

    bounds = _BOUNDS_BY_PATH["/v1/embeddings"]
    check_body(json.dumps({"input": [[1] * 512] * MAX_INPUTS}).encode(), bounds)
    with pytest.raises(ChangeSomething, match="input"):
        check_body(json.dumps({"input": [1] * 1_060_000}).encode(), bounds)


def test_inputs_of_a_body() -> None:
    assert EmbeddingsRequest(input="a").inputs() == ["a"]
    assert EmbeddingsRequest(input=[1, 2]).inputs() == [[1, 2]]
    assert EmbeddingsRequest(input=["a", "b"]).inputs() == ["a", "b"]
    assert EmbeddingsRequest(input=[[1], [2]]).inputs() == [[1], [2]]


def test_a_vector_that_is_cut_has_length_one_again() -> None:
    whole = np.asarray([0.6, 0.0, 0.8], np.float32)
    assert cut_to(whole, 3) is whole
    assert cut_to(whole, 1).tolist() == [1.0]
    assert cut_to(whole[1:], 1).tolist() == [0.0], "nothing is left to be scaled"
    assert cut_to(whole, 2).dtype == np.float32


def test_numbers_are_written_to_their_last_bit() -> None:
    drawn = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    told = [
        json.loads(b"".join(json_pieces(embeddings_body("m", drawn, kind, Usage(5, 0, 2, 3)))))
        for kind in ("float", "base64")
    ]
    for body in told:
        used = {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 3},
        }
        assert body["usage"] == used
    numbers = np.asarray([one["embedding"] for one in told[0]["data"]], np.float32)
    raw = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in told[1]["data"]]
    assert np.array_equal(numbers, drawn) and np.array_equal(np.asarray(raw), drawn)


def test_a_models_facts_are_asked_before_any_work() -> None:
    facts = replace(ByteText.embeddings, problem="pools its mean")
    with pytest.raises(ChangeSomething, match="pools its mean") as caught:
        facts.require_served(MODEL)
    assert (caught.value.field, caught.value.value) == ("model", MODEL)
