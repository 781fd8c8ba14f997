"""Long bodies mean the same as short ones; long lists of token ids are validated as short ones."""

import json
import math
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import ValidationError

from kvell.server.api.door.guards import LONG_BODY_BYTES, LongBodyRoute
from kvell.server.api.schemas.chat import DetokenizeRequest

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
