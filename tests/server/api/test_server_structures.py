"""Random large bodies within the bounds of every route, against a server's app."""

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message

from bench.server.hostile.bodies import MOST_BODY_BYTES, HostileRequest, hostile_bodies
from kvell.device.available import give_back_freed, process_bytes
from kvell.front.front import Front
from kvell.server.api.openai_api import build_app
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.text.served_text import ServedText
from kvell.vocabulary import MIB
from tests.depth import scaled

INSTANCE = Path(__file__).parents[1] / "scripted_server.py"
ROUTES = 6
"""Routes that 30 bodies reach; all bodies reach more."""
WARM, BODIES = 60, 400
LONGEST_TURN_SECONDS = 0.25
MOST_KEPT_BYTES = 64 * MIB
ANSWER_SECONDS = 120.0


def test_a_seed_yields_the_same_bodies_for_every_route() -> None:
    first, again = (list(islice(hostile_bodies(6), 30)) for _ in range(2))
    assert first == again != list(islice(hostile_bodies(7), 30))
    assert len({request.path for request in first}) >= ROUTES
    assert all(len(request.body) <= MOST_BODY_BYTES for request in first)


class LoopTurns:
    """The processor time of the event loop's thread in its longest turn.

    It does not depend on what else the machine does.
    """

    def __init__(self) -> None:
        self.longest_seconds = self._began_seconds = 0.0
        self._ends = False

    def begin(self) -> None:
        self.longest_seconds, self._began_seconds = 0.0, time.thread_time()

    @asynccontextmanager
    async def measured(self) -> AsyncIterator["LoopTurns"]:
        self.begin()
        asyncio.get_running_loop().call_soon(self._next)
        yield self
        self._ends = True

    def _next(self) -> None:
        now = time.thread_time()
        self.longest_seconds = max(self.longest_seconds, now - self._began_seconds)
        self._began_seconds = now
        if not self._ends:
            asyncio.get_running_loop().call_later(0.001, self._next)


async def ask(app: ASGIApp, request: HostileRequest) -> tuple[int, bytes]:
    """The status and the body of the answer to a request."""
    arrived: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not arrived:
            await asyncio.Event().wait()  # the client stays until it has its answer
        return arrived.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    headers: Mapping[str, str] = {**request.headers, "content-length": str(len(request.body))}
    scope = {
        "type": "http", "method": "POST", "path": request.path, "query_string": b"",
        "raw_path": request.path.encode(), "root_path": "", "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    async with asyncio.timeout(ANSWER_SECONDS):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def resident_bytes() -> int:
    gc.collect()
    give_back_freed()
    return process_bytes()


@contextmanager
def frozen() -> Iterator[None]:
    """Scan no objects of other tests on the loop, as a server does."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_body_holds_the_loop_fails_or_leaves_memory(smollm2_path: Path, seed: int) -> None:
    metrics = ServerMetrics("tiny")
    text = ServedText.load("tiny", smollm2_path)
    command = [sys.executable, str(INSTANCE), "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}"]
    statuses: Counter[int] = Counter()
    before_bytes = 0
    async with Front(command, observer=metrics) as front, LoopTurns().measured() as turns:
        app = build_app(front, text, metrics)
        with frozen():
            for number, request in enumerate(islice(hostile_bodies(seed), scaled(BODIES))):
                if number == WARM:
                    before_bytes = resident_bytes()
                turns.begin()
                status, answer = await ask(app, request)
                await asyncio.sleep(0.005)  # the turn after the answer is measured too
                shown = request.kind, request.path, request.body[:400], answer[:400]
                assert status < 500, shown
                if number:  # the first request imports modules
                    assert turns.longest_seconds <= LONGEST_TURN_SECONDS, shown
                statuses[status] += 1
            assert resident_bytes() - before_bytes <= MOST_KEPT_BYTES
    assert statuses[200] > 20 and statuses[400] > 20, statuses
