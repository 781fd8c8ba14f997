"""Paths that are not served: the nearest one is named, and only if it is near."""

import httpx
import pytest

from kvell.server.api.http_errors import nearest_path

pytestmark = pytest.mark.xdist_group("fake_server")

SERVED = (
    *("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/v1/messages", "/v1/embeddings", "/api/chat", "/api/generate"),
)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/model", "/v1/models"),
        ("/v1/metrics", "/metrics"),
        ("/api/chats", "/api/chat"),
        ("/api/generat", "/api/generate"),
        ("/v1chat/completions", "/v1/chat/completions"),
        ("/api/gen", None),
        ("/api/status", None),
        ("/v1/message/", "/v1/messages"),
        ("/v1/moderations", None),
        ("/v1", None),
        ("/nothing", None),
        ("/v1/audio/speech", None),
        ("/favicon.ico", None),
        ("//", None),
    ],
)
def test_a_path_is_near_by_its_end_or_by_its_letters(path: str, nearest: str | None) -> None:
    assert nearest_path(path, SERVED) == nearest


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/chat/completion", "is not served; use /v1/chat/completions"),
        ("/nothing", "is not served; see /docs or /v1/models for what is"),
    ],
)
def test_a_404_names_what_is_served(server_url: str, path: str, text: str) -> None:
    reply = httpx.post(server_url + path, json={})
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["message"], error["type"]) == (f"path={path}: {text}", "invalid_request_error")
    anthropic = httpx.post(f"{server_url}/v1/messages/count_token", json={}).json()
    assert anthropic["error"]["type"] == "not_found_error"
    assert anthropic["error"]["message"].endswith("; use /v1/messages/count_tokens")
    ollama = httpx.post(f"{server_url}/api/chats", json={}).json()
    assert ollama == {"error": "path=/api/chats: is not served; use /api/chat"}


def test_a_wrong_method_names_the_right_one(server_url: str) -> None:
    reply = httpx.get(f"{server_url}/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    text = "method=GET: is not taken by /v1/completions; use POST"
    assert reply.json()["error"]["message"] == text
    assert httpx.delete(f"{server_url}/health").headers["allow"] == "GET, HEAD"


def test_an_unknown_model_names_those_that_are_served(server_url: str) -> None:
    reply = httpx.post(f"{server_url}/v1/completions", json={"model": "gpt-4", "prompt": "a"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "model_not_found")
    assert error["message"] == "model=gpt-4: is not served; use fake (see /v1/models)"
