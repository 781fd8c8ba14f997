"""A server with OpenAI's API and known latencies, which a load tool must find.

``python -m bench.load.fixed_server --ttft 0.2 --tpot 0.02`` prints its address.  Token k of an
answer is sent at (arrival + TTFT + k × TPOT), whatever else is served: requests never wait for
each other.
"""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fixed"
TOKEN = " word"


@dataclass(frozen=True)
class Latencies:
    """Latencies of the server, in seconds."""

    ttft_seconds: float
    tpot_seconds: float

    def token_seconds(self, index: int) -> float:
        """Seconds from a request's arrival until token ``index`` is sent."""
        return self.ttft_seconds + index * self.tpot_seconds

    def e2e_seconds(self, tokens: int) -> float:
        """Seconds from a request's arrival until the last of ``tokens`` tokens is sent."""
        return self.token_seconds(tokens - 1)


def build_app(latencies: Latencies) -> Starlette:
    """The server's application."""

    async def completions(request: Request) -> Response:
        return await _answered(request, latencies, is_chat=False)

    async def chat(request: Request) -> Response:
        return await _answered(request, latencies, is_chat=True)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "serving"})

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


async def _answered(request: Request, latencies: Latencies, *, is_chat: bool) -> Response:
    arrived_seconds = asyncio.get_running_loop().time()
    asked = await request.json()
    count = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
    events = answer_events(
        arrived_seconds, latencies, count, _prompt_tokens(asked), is_chat=is_chat
    )
    if asked.get("stream"):
        return StreamingResponse(events, media_type="text/event-stream")
    async for _ in events:
        pass
    usage = _usage(_prompt_tokens(asked), count)
    return JSONResponse(_chunk(TOKEN * count, "length", is_chat=is_chat) | {"usage": usage})


async def answer_events(
    arrived_seconds: float, latencies: Latencies, count: int, prompt_tokens: int, *, is_chat: bool
) -> AsyncGenerator[bytes, None]:
    """The events of an answer, each sent at its time."""
    loop = asyncio.get_running_loop()
    for index in range(count):
        due_seconds = arrived_seconds + latencies.token_seconds(index)
        await asyncio.sleep(max(0.0, due_seconds - loop.time()))
        reason = "length" if index + 1 == count else None
        yield _sse(_chunk(TOKEN, reason, is_chat=is_chat))
    yield _sse({"model": MODEL, "choices": [], "usage": _usage(prompt_tokens, count)})
    yield b"data: [DONE]\n\n"


def _chunk(text: str, reason: str | None, *, is_chat: bool) -> dict[str, Any]:
    said = {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice = {"index": 0, "finish_reason": reason, **said}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "fixed", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}


def _usage(prompt_tokens: int, count: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": count,
        "total_tokens": prompt_tokens + count,
    }


def _prompt_tokens(asked: dict[str, Any]) -> int:
    """Number of prompt tokens: token ids, or words of a text."""
    prompt = asked.get("prompt", "")
    return len(prompt) if isinstance(prompt, list) else max(1, len(str(prompt).split()))


def _sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft", type=float, required=True, help="seconds")
    parser.add_argument("--tpot", type=float, required=True, help="seconds")
    options = parser.parse_args()
    app = build_app(Latencies(options.ttft, options.tpot))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
