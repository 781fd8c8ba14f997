"""For operators: probes, ``/load``, ``/metrics``, ``/debug`` and ``/reset_prefix_cache``."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

from kvell.device.process_size import process_bytes, tree_bytes
from kvell.engine.protocol.statistics import Stats
from kvell.errors import TryLater
from kvell.front.front import Front
from kvell.server.api.bodies.pieces import json_response
from kvell.server.metrics.front_metrics import CONTENT_TYPE, ServerMetrics
from kvell.server.metrics.instance_metrics import InstanceFigures
from kvell.server.metrics.memory_page import InstanceMemory, memory_page

STATS_SECONDS = 2.0


@dataclass(frozen=True)
class OperatorApi:
    """The handlers.

    :param metrics: the observer that was given to the front.
    :param floor_bytes: of this process before it served anything.
    :param work_bytes: the most that reading texts and pictures takes beside that.
    """

    front: Front
    metrics: ServerMetrics
    floor_bytes: int
    work_bytes: int = 0

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/livez", self.alive, methods=["GET"])
        for path in ("/readyz", "/health"):
            app.add_api_route(path, self.health, methods=["GET"])
        # One route answers both methods, so that a 405 names both; a schema's operations have one.
        both = ("GET", "POST")
        app.add_api_route("/ping", self.ping, methods=list(both), include_in_schema=False)
        for method in both:
            app.add_api_route("/ping", self.ping, methods=[method])
        app.add_api_route("/load", self.load, methods=["GET"])
        text = PlainTextResponse
        app.add_api_route("/metrics", self.prometheus, methods=["GET"], response_class=text)
        app.add_api_route("/debug/memory", self.memory, methods=["GET"])
        app.add_api_route("/debug/audit", self.audit, methods=["GET"])
        app.add_api_route("/reset_prefix_cache", self.on_reset, methods=["POST"])

    async def alive(self) -> Response:
        """Answer 200 unless all instances have failed; ``status`` as of ``/health``.

        For an orchestrator's liveness probe.  A front whose instances load or restart must not be
        killed for it: that would end the streams of others, and what comes back loads again.
        """
        status = 503 if self.front.state == "failed" else 200
        return json_response({"status": self.front.state}, status)

    async def health(self) -> Response:
        """Answer 200 while an instance serves, else 503; ``status`` says what is going on."""
        status = 200 if self.front.state == "serving" else 503
        return json_response({"status": self.front.state}, status)

    async def ping(self) -> Response:
        """Answer as ``/health``; Amazon SageMaker asks here."""
        return await self.health()

    async def load(self) -> Response:
        """Tell how many answers run or wait, as ``server_load``."""
        return json_response({"server_load": self.front.in_flight + self.front.waiting})

    async def prometheus(self) -> Response:
        """Give every metric in Prometheus's text format."""
        told = await self._stats()
        members = [one for one, _ in self.front.instances()]
        # In a thread: the system walks all of a process's pages to say how many it takes.
        front_bytes, *sizes = await asyncio.to_thread(_sizes_of, [one.pid_here for one in members])
        known = self.metrics.instances
        known.front_waiting, known.front_bytes = self.front.waiting, front_bytes
        known.instances = {
            one.instance_id: InstanceFigures(
                told.get(one.instance_id), one.ready, one.restarts, size_bytes
            )
            for one, size_bytes in zip(members, sizes, strict=True)
        }
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def memory(self) -> Response:
        """Tell what was promised of the machine's memory and who has it now, in bytes.

        The status is 503 while no instance answers.
        """
        told = await self._stats()
        known = {
            one.instance_id: InstanceMemory(one.ready, told[one.instance_id], one.pid_here)
            for one, _ in self.front.instances()
            if one.ready is not None and one.instance_id in told
        }
        if not known:
            return self._nobody()
        is_one_host = not any(one.host for one, _ in self.front.instances())
        page = memory_page(known, self.floor_bytes, self.work_bytes, shares_weights=is_one_host)
        return json_response(page)

    async def audit(self) -> Response:
        """Let every instance recount its pages, and tell every contradiction that it finds.

        The status is 503 while no instance answers.
        """
        told = await self._stats(with_audit=True)
        if not told:
            return self._nobody()
        problems = {name: list(stats.problems or ()) for name, stats in told.items()}
        return json_response({"clean": not any(problems.values()), "problems": problems})

    async def on_reset(self) -> Response:
        """Let every instance evict its cached prefixes; a body is not read.

        Pages that requests in progress use stay, and others may hit them.  Requests that come later
        find nothing else.  The status is 503 while no instance serves.
        """
        if not self.front.forget_prefixes():
            return self._nobody()
        return json_response({})

    def _nobody(self) -> Response:
        return json_response({"error": f"no instance answers just now ({self.front.state})"}, 503)

    async def _stats(self, *, with_audit: bool = False) -> dict[str, Stats]:
        """What each instance says within a bounded time; those that are silent are left out."""
        try:
            return await self.front.stats(STATS_SECONDS, with_audit=with_audit)
        except TryLater:
            return {}


def _sizes_of(pids: Sequence[int | None]) -> list[int]:
    """Bytes of this process and then of each instance; 0 for one that is not there."""
    return [process_bytes(), *(tree_bytes(pid) if pid else 0 for pid in pids)]
