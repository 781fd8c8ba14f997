"""The door's part of a trace: which visits have one, their route and status, however they end."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from kvell.clock import VirtualClock
from kvell.server.access.keys import KeyRing, operator_key
from kvell.server.access.traced_visit import Tracer, VisitRecord
from kvell.server.api.door.access_guard import Access, AccessGuard, visit_of
from tests.server.tracing.records import BEGAN_NS, PARENT

WITH_KEY = {"Authorization": "Bearer secret"}


class Door:
    def __init__(self, *, is_traced: bool = True) -> None:
        self.written: list[VisitRecord] = []
        self.traces: list[object] = []
        self.clock = VirtualClock(100.0)
        tracer = Tracer(self.written.append, lambda: BEGAN_NS) if is_traced else None
        keys = KeyRing((operator_key("secret"),), 0.0)
        self.app = FastAPI()
        self.app.add_api_route("/v1/things/{name}", self.answer, methods=["POST"])
        self.app.add_api_route("/health", self.answer, methods=["POST"])
        self.guarded = AccessGuard(self.app, Access(keys, clock=self.clock, tracer=tracer))

    async def answer(self, request: Request, name: str = "") -> Response:
        self.traces.append(visit_of(request).trace)
        self.clock.advance(2.0)
        if name == "broken":
            raise ValueError("a bug")
        return Response(status_code=418 if name == "teapot" else 200)

    def ask(self, path: str, headers: dict[str, str] | None = None) -> int:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.guarded, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.post(path, headers=WITH_KEY if headers is None else headers)

        return asyncio.run(asked()).status_code


@pytest.mark.parametrize(("name", "status"), [("a", 200), ("teapot", 418), ("broken", 500)])
def test_a_visit_ends_with_its_status_and_its_route(name: str, status: int) -> None:
    door = Door()
    door.ask(f"/v1/things/{name}", WITH_KEY | {"traceparent": PARENT})
    [record] = door.written
    assert record.route == "/v1/things/{name}"
    assert (record.visit.method, record.visit.status) == ("POST", status)
    assert (record.began_seconds, record.visit.seconds) == (100.0, 2.0)
    assert record.parent == {"traceparent": [PARENT]}


def test_a_path_that_is_not_served_has_no_route() -> None:
    door = Door()
    assert door.ask("/v1/a-text-of-mine") == 404
    assert [one.route for one in door.written] == [""]


def test_who_has_no_key_gets_no_trace() -> None:
    door = Door()
    for headers in ({}, {"Authorization": "Bearer guessed"}):
        assert door.ask("/v1/things/a", headers | {"traceparent": PARENT}) == 401
    assert door.written == []


def test_what_is_not_traced_is_served_all_the_same() -> None:
    door, plain = Door(), Door(is_traced=False)
    assert (door.ask("/health"), plain.ask("/v1/things/a")) == (200, 200)
    assert (door.traces, plain.traces) == ([None], [None])
    assert (door.written, plain.written) == ([], [])


def test_two_visits_at_once_have_records_of_their_own() -> None:
    door = Door()

    async def both() -> list[Any]:
        transport = httpx.ASGITransport(door.guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = (client.post(f"/v1/things/{n}", headers=WITH_KEY) for n in ("a", "teapot"))
            return await asyncio.gather(*asked)

    asyncio.run(both())
    assert sorted(one.visit.status for one in door.written) == [200, 418]
    assert len({id(trace) for trace in door.traces}) == 2
