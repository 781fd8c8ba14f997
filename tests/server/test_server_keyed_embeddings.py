"""Embeddings on a server with keys: tenants, limits and the log, as for answers."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.keyed import Keyed, keyed_server

SECRET = "the secret that is embedded"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed_server(tmp_path_factory.mktemp("keys"), "--step-seconds", "0.002") as server:
        yield server


def post(keyed: Keyed, key: str, given: Any, **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"input": given, "encoding_format": "base64", **fields}
    return httpx.post(f"{keyed.url}/v1/embeddings", json=body, headers=headers, timeout=30)


def cached(keyed: Keyed, key: str, **fields: Any) -> int:
    usage = post(keyed, key, SECRET, **fields).json()["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_no_tenant_hits_what_another_has_cached(keyed: Keyed) -> None:
    assert cached(keyed, "red-1") == 0
    assert cached(keyed, "red-2") == len(SECRET) - 1, "keys of one tenant share"
    assert cached(keyed, "blue-1") == 0
    for salt in ("red", "3:red", ":red"):
        assert cached(keyed, "blue-1", cache_salt=salt) == 0


def test_tokens_are_counted_once_and_exhausted_ones_are_429(keyed: Keyed) -> None:
    """A key with 5 requests and 1,000 tokens a minute: no output is reserved; each input is one."""
    first = post(keyed, "small-1", ["x" * 300, "y" * 300])
    assert first.status_code == 200
    left = int(first.headers["x-ratelimit-remaining-tokens"])
    assert 400 <= left < 500, "a little has come back since"
    refused = post(keyed, "small-1", "z" * 600)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    too_large = post(keyed, "small-1", ["x" * 600, "y" * 600])
    assert too_large.status_code == 400
    assert "1000 tokens per minute" in too_large.json()["error"]["message"]
    wrong = post(keyed, "small-1", [""])
    assert wrong.status_code == 400
    assert int(wrong.headers["x-ratelimit-remaining-tokens"]) >= left
    assert post(keyed, "small-1", "too many requests").status_code == 429


def test_the_log_tells_of_it_and_never_of_its_text(keyed: Keyed) -> None:
    assert post(keyed, "blue-1", [SECRET, "another"]).status_code == 200
    tokens = len(SECRET) + len("another")
    line = keyed.line("request_ended", path="/v1/embeddings", tenant="blue", prompt_tokens=tokens)
    assert line["id"].startswith("embd-")
    assert (line["status"], line["output_tokens"], line["model"]) == (200, 0, "fake")
    assert SECRET not in str(keyed.seen)
