"""Figures that many ask for: made for all together, and not on threads that bodies need."""

import asyncio
import gzip
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvell.engine.protocol.statistics import Stats
from kvell.errors import Bound
from kvell.front.front import Front
from kvell.server.access.bodies import BodyBounds
from kvell.server.api.door.face_options import FaceOptions
from kvell.server.api.door.guards import BodyLimit
from kvell.server.api.openai_api import build_app
from kvell.server.api.routes import operator as process_sizes
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.text.lanes import WAITING_BYTES, TextWork
from kvell.testing.instance import ByteText
from tests.server.api.bodies import answer, echo

INSTANCE = [sys.executable, str(Path(__file__).parents[2] / "fleet" / "fake_instance.py")]
INSTANCE += ["--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}"]
MANY = 50
BODY = json.dumps({"prompt": "hello"}).encode()
GZIPPED = {"content-type": "application/json", "content-encoding": "gzip"}


class CountingFront(Front):
    """A front that counts how often instances are asked for their statistics."""

    looks = 0

    async def stats(
        self, deadline_seconds: float = 5.0, *, with_audit: bool = False
    ) -> dict[str, Stats]:
        self.looks += 1
        return await super().stats(deadline_seconds, with_audit=with_audit)


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[asyncio.Runner, CountingFront]]:
    with asyncio.Runner() as runner:
        front = CountingFront(INSTANCE, observer=ServerMetrics("fake"))
        runner.run(front.start())
        yield runner, front
        runner.run(front.close())


async def answers(front: Front, path: str, count: int) -> list[httpx.Response]:
    face = FaceOptions(root_path="/llm")
    app = build_app(front, ByteText(), ServerMetrics("fake"), face=face)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await asyncio.gather(*(client.get(path) for _ in range(count)))


@pytest.mark.parametrize("path", ["/metrics", "/debug/memory", "/debug/audit", "/debug/pages"])
def test_a_page_is_made_for_all_who_ask_together(
    started: tuple[asyncio.Runner, CountingFront], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, front = started
    threads: list[str] = []

    def measured(pid: int | None = None) -> int:
        threads.append(threading.current_thread().name)
        return 7

    monkeypatch.setattr(process_sizes, "process_bytes", measured)
    front.looks = 0
    shown = runner.run(answers(front, path, MANY))
    assert {one.status_code for one in shown} == {200}
    assert 1 <= front.looks <= 2
    assert len(threads) <= 1
    assert all(name.startswith("kvell-process-sizes") for name in threads)
    ids = {one.headers["x-request-id"] for one in shown}
    assert len(ids) == MANY, "answers are shared, visits are not"


def test_the_document_of_the_api_is_written_once(
    started: tuple[asyncio.Runner, CountingFront],
) -> None:
    runner, front = started
    first, second = runner.run(answers(front, "/openapi.json", 2))
    assert first.content == second.content
    assert first.headers["content-type"] == "application/json"
    assert first.json()["servers"] == [{"url": "/llm"}]
    assert "/v1/completions" in first.json()["paths"]


async def test_a_compressed_body_is_read_while_all_other_threads_are_taken() -> None:
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    taken = loop.run_in_executor(None, go_on.wait)
    transport = httpx.ASGITransport(BodyLimit(echo, 1000, BodyBounds()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.post("/x", content=gzip.compress(BODY), headers=GZIPPED)
    assert not taken.done()
    go_on.set()
    assert reply.content == BODY


async def test_too_many_waiting_compressed_bodies_are_refused_by_name() -> None:
    go_on = threading.Event()
    told: list[Bound] = []
    work = TextWork()
    first = asyncio.create_task(work.run_body(8 * WAITING_BYTES, go_on.wait))
    await asyncio.sleep(0)
    limited = BodyLimit(echo, 1000, BodyBounds(), rejected=told.append, work=work)
    reply = await asyncio.to_thread(answer, limited, headers=GZIPPED, content=gzip.compress(BODY))
    go_on.set()
    await first
    work.close()
    assert reply.status_code == 429
    assert told == ["body_bytes"]
