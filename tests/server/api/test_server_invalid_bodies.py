"""Complaints about bodies name the field as it was sent, however many kinds it may have."""

import json
import math
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kvell.server.api.door.guards import LONG_BODY_BYTES, LongBodyRoute
from kvell.server.api.http_errors import NOT_JSON, complaint
from kvell.server.api.schemas.chat import ChatRequest, DetokenizeRequest
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.schemas.responses import ResponsesRequest

HI = {"role": "user", "content": "hi"}


def told(model: type[BaseModel], body: Any) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    return complaint(errors, body)


@pytest.mark.parametrize(
    ("model", "body", "field", "words"),
    [
        (ChatRequest, {}, "messages", "required"),
        (ChatRequest, {"messages": "hi"}, "messages", "list"),
        (ChatRequest, {"messages": [HI, {"content": "x"}]}, "messages[1].role", "required"),
        (ChatRequest, {"messages": [HI | {"content": 7}]}, "messages[0].content", "string"),
        (
            ChatRequest,
            {"messages": [HI | {"content": [{"type": "text", "text": "a"}, {"type": "text"}]}]},
            "messages[0].content[1].text",
            "required",
        ),
        (
            ChatRequest,
            {"messages": [HI | {"content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0]",
            "type=input_audio: is not served",
        ),
        (
            ChatRequest,
            {"messages": [HI | {"content": [{"text": "a"}]}]},
            "messages[0].content[0]",
            "has no type",
        ),
        (ChatRequest, {"messages": [HI], "stop": 5}, "stop", ", or "),
        (ChatRequest, {"messages": [HI], "stop": ["a", 5]}, "stop[1]", "string"),
        (
            ChatRequest,
            {"messages": [HI], "response_format": {"type": "xml"}},
            "response_format.type",
            "json_schema",
        ),
        (
            ChatRequest,
            {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": 5}},
            "response_format.json_schema",
            "",
        ),
        (
            ChatRequest,
            {"messages": [HI], "stream_options": {"include_usage": "perhaps"}},
            "stream_options.include_usage",
            "boolean",
        ),
        (CompletionRequest, {"prompt": [[1, "x"]]}, "prompt[0][1]", "integer"),
        (
            ResponsesRequest,
            {"input": [{"type": "item_reference"}]},
            "input[0]",
            "type=item_reference: is not served",
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
            "type=input_file: is not served",
        ),
    ],
)
def test_the_field_is_named_as_it_was_sent(
    model: type[BaseModel], body: Any, field: str, words: str
) -> None:
    message, param = told(model, body)
    assert param == field
    assert message.startswith(f"{field}: ")
    assert words in message


def test_a_body_that_is_no_json_blames_no_field() -> None:
    assert complaint([{"type": "json_invalid", "loc": ("body", 7), "msg": "x"}], "{") == (
        NOT_JSON,
        None,
    )


def test_a_body_that_is_no_object_is_named_itself() -> None:
    message, param = told(ChatRequest, [1])
    assert message.startswith("body: ")
    assert param is None


SECRET = "the secret prompt"


@given(
    st.recursive(
        st.none() | st.integers() | st.just(SECRET),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "text", "content", "role", "messages", "stop", "tools"]),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_whatever_is_wrong_is_told_in_one_short_line_without_what_was_said(body: Any) -> None:
    try:
        ChatRequest.model_validate(body)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        message, param = complaint(errors, body)
        assert "\n" not in message
        assert len(message) < 1000
        if param is not None:
            assert message.startswith(param)
        if "type=" not in message:  # a type is a name, and told so that one sees what is meant
            assert SECRET not in message


PADDING = b" " * LONG_BODY_BYTES
BODIES = [b'{"a": [1, -2, 1.5, 1e3, 36893488147419103232], "b": {"\\u00e9": null, "b": true}}']
NUMBERS = [b'{"a": NaN}', b'{"a": 1e999}', b'{"a": -Infinity}']


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.router.route_class = LongBodyRoute

    async def seen(request: Request) -> dict[str, Any]:
        return {"seen": repr(await request.json())}

    app.add_api_route("/seen", seen, methods=["POST"])
    return TestClient(app)


@pytest.mark.parametrize("padding", [b"", PADDING])
@pytest.mark.parametrize("body", BODIES + NUMBERS)
def test_a_body_has_the_same_value_at_any_length(
    client: TestClient, body: bytes, padding: bytes
) -> None:
    answer = client.post("/seen", content=body + padding)
    assert answer.json()["seen"] == repr(json.loads(body))


def test_numbers_that_only_python_reads_are_in_the_bodies() -> None:
    assert not any(math.isfinite(json.loads(body)["a"]) for body in NUMBERS)


@pytest.mark.parametrize("count", [0, 1, 50_000])
def test_valid_ids_are_kept(count: int) -> None:
    ids = [7] * count + [0, 2**31 - 1]
    assert DetokenizeRequest.model_validate({"tokens": ids}).tokens == ids


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.5, "x", None, [1]])
def test_the_first_invalid_id_is_named(wrong: object) -> None:
    with pytest.raises(ValidationError) as caught:
        DetokenizeRequest.model_validate({"tokens": [7] * 50_000 + [wrong, wrong]})
    [error] = caught.value.errors()
    assert error["loc"] == ("tokens", 50_000)


def test_too_many_ids_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most 1048576 items"):
        DetokenizeRequest.model_validate({"tokens": [7] * ((1 << 20) + 1)})
