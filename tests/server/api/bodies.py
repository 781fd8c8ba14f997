import asyncio
import json
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvell.server.api.schemas.chat import ChatRequest
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.text.text_bounds import AnswerRoom
from kvell.testing.instance import ByteText, fake_vector


def vector(given: str | list[int]) -> NDArray[np.float32]:
    ids = ByteText().encode(given) if isinstance(given, str) else np.asarray(given)
    return fake_vector(ids.astype("<i4").tobytes())


def cluster(url: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{url}/cluster", timeout=30).json()
    return told


def is_idle(url: str) -> bool:
    told = cluster(url)
    left = told["front"]["waiting"] + sum(one["in_flight"] for one in told["instances"])
    return int(left) == 0


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvell:{name}"))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(body)(scope, receive, send)


def answer(
    app: ASGIApp, path: str = "/v1/x", headers: dict[str, str] | None = None, content: bytes = b""
) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = {"content-type": "application/json"} | (headers or {})
            return await client.post(path, headers=sent, content=content)

    return asyncio.run(ask())


def events(url: str, path: str, **asked: Any) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}/v1/{path}", json={"model": "fake", "max_tokens": 60, **asked})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    return [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]


HELLO = [{"role": "user", "content": "hello"}]


def room(tokens: int) -> AnswerRoom:
    """Of a model whose requests stay within one instance."""
    return AnswerRoom(tokens, tokens)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hello"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HELLO} | fields)
