"""``/score`` and ``/rerank`` over fake instances: cosines of the vectors that embeddings have."""

from typing import Any

import httpx
import numpy as np
import pytest

from kvell.server.api.schemas.embeddings import MAX_INPUTS
from kvell.testing.instance import REFUSE_TOKEN
from tests.server.api.bodies import metric, vector

pytestmark = pytest.mark.xdist_group("fake_server")

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
DOCUMENTS = ["a page", "a pool", "the sea", "a page"]


def cosine(one: str, other: str) -> float:
    return float(np.dot(vector(one).astype("f8"), vector(other)))


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=fields, timeout=60)


@pytest.mark.parametrize("path", SCORE_PATHS)
@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"text_1": "one", "text_2": "two"}, [("one", "two")]),
        ({"text_1": "one", "text_2": ["two", "one"]}, [("one", "two"), ("one", "one")]),
        ({"text_1": ["one"], "text_2": ["two", "a"]}, [("one", "two"), ("one", "a")]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ({"queries": "one", "documents": ["two", "a"]}, [("one", "two"), ("one", "a")]),
    ],
)
def test_pairs_are_scored_by_their_cosine(
    server_url: str, path: str, fields: dict[str, Any], pairs: list[tuple[str, str]]
) -> None:
    reply = post(server_url, path, model="fake", **fields).json()
    assert (reply["object"], reply["model"]) == ("list", "fake")
    assert set(reply) == {"id", "object", "created", "model", "data", "usage"}
    assert [one["index"] for one in reply["data"]] == list(range(len(pairs)))
    assert {one["object"] for one in reply["data"]} == {"score"}
    told = [one["score"] for one in reply["data"]]
    assert told == pytest.approx([cosine(*pair) for pair in pairs])
    assert max(map(abs, told)) <= 1
    texts = [
        text for each in fields.values() for text in ([each] if isinstance(each, str) else each)
    ]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", RERANK_PATHS)
def test_documents_come_in_the_order_of_their_relevance(server_url: str, path: str) -> None:
    reply = post(server_url, path, query="what is a page?", documents=DOCUMENTS).json()
    scores = [cosine("what is a page?", document) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda index: -scores[index])
    results = reply["results"]
    assert [one["index"] for one in results] == order
    assert order.index(0) < order.index(3), "equal ones stay in their order"
    assert [one["relevance_score"] for one in results] == pytest.approx([scores[i] for i in order])
    assert [one["document"]["text"] for one in results] == [DOCUMENTS[i] for i in order]
    assert set(reply) == {"id", "model", "usage", "results"}
    tokens = len("what is a page?") + sum(map(len, DOCUMENTS))
    assert reply["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize(
    ("fields", "count", "has_text"),
    [
        ({"top_n": 2}, 2, True),
        ({"top_n": 0}, 4, True),
        ({"top_n": 9}, 4, True),
        ({"return_documents": False}, 4, False),
        ({"return_documents": True, "top_n": 1}, 1, True),
        ({"use_activation": True, "user": "me", "priority": 1, "prompt_cache_key": "k"}, 4, True),
    ],
)
def test_as_many_are_told_as_were_asked_for(
    server_url: str, fields: dict[str, Any], count: int, has_text: bool
) -> None:
    plain = post(server_url, "/rerank", query="q", documents=DOCUMENTS).json()["results"]
    objects = [{"text": document} for document in DOCUMENTS]
    told = post(server_url, "/rerank", query="q", documents=objects, **fields).json()["results"]
    if not has_text:
        assert not any("document" in one for one in told)
        told = [one | {"document": {"text": DOCUMENTS[one["index"]]}} for one in told]
    assert told == plain[:count]


def test_as_many_documents_as_embeddings_have_inputs(server_url: str) -> None:
    documents = [{"text": f"document {index}"} for index in range(MAX_INPUTS - 1)]
    reply = post(server_url, "/v1/rerank", query="q", documents=documents, top_n=3)
    assert reply.status_code == 200, reply.text[:300]
    scores = [cosine("q", one["text"]) for one in documents]
    assert reply.json()["results"][0]["relevance_score"] == pytest.approx(max(scores))


def test_what_was_embedded_before_is_found_in_the_cache(server_url: str) -> None:
    fields = {"query": "a question of its own", "documents": ["a document of its own"]}
    for cached in (0, len(fields["query"]) + len(fields["documents"][0]) - 2):
        usage = post(server_url, "/rerank", **fields).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
    ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
    ("/score", {"text_1": "a", "text_2": ["b"] * MAX_INPUTS}, "text_2"),
    ("/score", {"text_1": 5, "text_2": "a"}, "text_1"),
    ("/score", {"queries": "a", "documents": "x" * 4097}, "documents"),
    ("/score", {"text_1": "a", "text_2": "b", "priority": 1 << 40}, "priority"),
    ("/rerank", {"query": "q"}, "documents"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/rerank", {"query": "q", "documents": []}, "documents"),
    ("/rerank", {"query": "q", "documents": ["a"] * MAX_INPUTS}, "documents"),
    ("/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents"),
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "q", "documents": ["a"], "stream": True}, "stream"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSALS)
def test_bad_input_is_refused_by_name(
    server_url: str, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = post(server_url, path, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].split("[")[0] == param
    assert len(reply.text) < 1000


def test_other_models_and_refusals_are_answered_as_by_embeddings(server_url: str) -> None:
    unknown = post(server_url, "/score", text_1="a", text_2="b", model="another")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    refused = post(server_url, "/rerank", query="q", documents=[chr(REFUSE_TOKEN)])
    assert refused.status_code == 400
    assert "can never fit" in refused.json()["error"]["message"]


def test_answers_are_counted_by_their_path(server_url: str) -> None:
    for path in (*SCORE_PATHS, *RERANK_PATHS):
        name = f'http_responses_total{{model_name="fake",path="{path}",status="400"'
        before = metric(server_url, name)
        assert post(server_url, path, query=[]).status_code == 400
        assert metric(server_url, name) == before + 1
