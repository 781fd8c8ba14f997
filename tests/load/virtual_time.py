"""An event loop whose time passes only while all tasks sleep, and a server without a network."""

import asyncio
import json
import selectors
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvell.load.http.client import HttpClient
from kvell.load.http.wire import RefusedResponse

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nobody will wake anybody")
        self.now_seconds += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_seconds


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


@dataclass(frozen=True)
class Asked:
    at_seconds: float
    path: str
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def prompt(self) -> Any:
        return self.body["prompt"]


@dataclass
class FakeServer(HttpClient):
    """Answers with one piece of text per token, after known times.

    :param problem: returns the failure of a request by number; None if it succeeds.
    """

    first_seconds: float = 0.5
    each_seconds: float = 0.1
    models: tuple[str, ...] = ("fake",)
    metrics: list[str] = field(default_factory=list)
    problem: Callable[[int], Exception | bytes | None] = lambda _number: None
    cached_tokens: int | None = None
    asked: list[Asked] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    async def answer_to(self, path: str) -> tuple[int, bytes]:
        if path == "/metrics":
            return (200, self.metrics.pop(0).encode()) if self.metrics else (404, b"")
        cards = [{"id": name} for name in self.models]
        return 200, json.dumps({"object": "list", "data": cards}).encode()

    async def stream_of(self, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        loop, number = asyncio.get_running_loop(), len(self.asked)
        asked = Asked(loop.time(), path, body)
        self.asked.append(asked)
        problem = self.problem(number)
        try:
            await asyncio.sleep(self.first_seconds)
            if isinstance(problem, Exception):
                raise problem
            for index in range(asked.body["max_tokens"]):
                if index:
                    await asyncio.sleep(self.each_seconds)
                if problem is not None and index == 1:
                    yield loop.time(), problem
                    return
                yield loop.time(), event(self._piece(path, f" a{number}.{index}"))
            yield loop.time(), event(self._usage(asked.body)) + b"data: [DONE]\n\n"
            self.ended.append(number)
        except GeneratorExit:
            self.left.append(number)
            raise

    def _piece(self, path: str, text: str) -> dict[str, Any]:
        choice = {"delta": {"content": text}} if "chat" in path else {"text": text}
        return {"choices": [{"index": 0, **choice, "finish_reason": None}]}

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": len(body.get("prompt", "")),
            "completion_tokens": body["max_tokens"],
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return {"choices": [], "usage": usage}


def refused(status: int) -> RefusedResponse:
    return RefusedResponse(status, "no")
