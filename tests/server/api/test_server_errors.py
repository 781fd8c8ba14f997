"""Every error family has its status and OpenAI's shape; bugs show nothing of their inside."""

import json

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from kvell.errors import Bound, ChangeSomething, InstanceDied, KvellError, RequestFailed, TryLater
from kvell.server.api import http_errors
from kvell.server.api.http_errors import UnknownModel, api_error
from kvell.server.text.text_bounds import ContextTooLong
from kvell.server.text.text_stream import DeadlineExceeded, RequestRefused

SECRET = "the secret prompt"


class Body(BaseModel):
    number: int
    text: str = ""


def app_that_raises(error: Exception, told: list[Bound] | None = None) -> TestClient:
    app = FastAPI()
    http_errors.install(app, (told if told is not None else []).append)

    async def fail() -> None:
        raise error

    async def take(body: Body) -> int:
        return body.number

    app.add_api_route("/fail", fail)
    app.add_api_route("/take", take, methods=["POST"])
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (ChangeSomething("n", 2, "p", "r"), 400, "invalid_request_error", "n", None),
        (
            ContextTooLong("prompt", 9, "p", "r"),
            400,
            "invalid_request_error",
            "prompt",
            "context_length_exceeded",
        ),
        (UnknownModel("m"), 404, "invalid_request_error", "model", "model_not_found"),
        (RequestRefused("never"), 400, "invalid_request_error", None, None),
        (RequestRefused("too long", "prompt"), 400, "invalid_request_error", "prompt", None),
        (TryLater("full"), 429, "rate_limit_error", None, "too_many_requests"),
        (InstanceDied("gone"), 503, "service_unavailable_error", None, None),
        (RequestFailed("died"), 500, "server_error", None, None),
        (KvellError("odd"), 500, "server_error", None, None),
        (RuntimeError("bug"), 500, "server_error", None, None),
    ],
)
def test_each_family_has_its_status(
    error: Exception, status: int, kind: str, param: str | None, code: str | None
) -> None:
    reply = app_that_raises(error).get("/fail")
    assert reply.status_code == status
    body = reply.json()["error"]
    assert (body["type"], body["param"], body["code"]) == (kind, param, code)
    assert body["message"]
    assert ("retry-after" in reply.headers) == (status in (429, 503))


def test_a_bug_shows_nothing_of_its_inside() -> None:
    assert SECRET not in json.dumps(api_error(ValueError(SECRET)).body())


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"number": "many", "text": "the secret prompt"}', "number"),
        (b'{"number": 1, "text": ["the secret prompt"]}', "text"),
        (b"{", None),
        (b"the secret prompt", None),
    ],
)
def test_an_invalid_body_is_explained_without_being_repeated(
    content: bytes, param: str | None
) -> None:
    client = app_that_raises(RuntimeError())
    reply = client.post("/take", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert SECRET not in reply.text


def test_unknown_paths_and_methods_have_the_shape_too() -> None:
    client = app_that_raises(RuntimeError())
    for reply, status in ((client.get("/nowhere"), 404), (client.get("/take"), 405)):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ChangeSomething("n", 2, "p", "r"), "invalid_request_error"),
        (UnknownModel("m"), "not_found_error"),
        (TryLater("full"), "rate_limit_error"),
        (InstanceDied("gone"), "overloaded_error"),
        (DeadlineExceeded("late"), "timeout_error"),
        (RequestFailed("died"), "api_error"),
    ],
)
def test_below_v1_messages_errors_have_anthropics_shape(error: Exception, kind: str) -> None:
    found = api_error(error)
    told = json.loads(bytes(found.response("/v1/messages/count_tokens").body))
    assert told == {"type": "error", "error": {"type": kind, "message": found.message}}
    assert json.loads(bytes(found.response("/v1/chat/completions").body)) == found.body()


def test_an_exceeded_bound_is_told_to_whom_counts_them_and_other_errors_are_not() -> None:
    told: list[Bound] = []
    exceeding = ChangeSomething("prompt", "…", "is too long", "send less", bound="text_bytes")
    assert app_that_raises(exceeding, told).get("/fail").status_code == 400
    refused = RequestRefused("too complex", "structured_outputs.grammar", "grammar")
    assert app_that_raises(refused, told).get("/fail").status_code == 400
    assert app_that_raises(TryLater("full"), told).get("/fail").status_code == 429
    assert app_that_raises(ChangeSomething("n", 0, "is odd", "use 1"), told).get("/fail")
    assert told == ["text_bytes", "grammar"]
