"""Routes for operators: probes, ``/load``, ``/metrics``, ``/debug`` and ``/reset_prefix_cache``."""

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
    """The handlers for operators.

    :param metrics: the front's observer.
    :param floor_bytes: memory of this process before it served anything.
    :param work_bytes: maximum further memory for reading texts and images.
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

        For an orchestrator's liveness probe.  A server must not be killed because instances load or
        restart: that would end the streams of other instances, and load all models again.
        """
        status = 503 if self.front.state == "failed" else 200
        return json_response({"status": self.front.state}, status)

    async def health(self) -> Response:
        """Answer 200 while an instance serves, else 503; ``status`` is the state of the server."""
        status = 200 if self.front.state == "serving" else 503
        return json_response({"status": self.front.state}, status)

    async def ping(self) -> Response:
        """Answer like ``/health``; Amazon SageMaker uses this path."""
        return await self.health()

    async def load(self) -> Response:
        """Return the number of answers that run or wait, as ``server_load``."""
        return json_response({"server_load": self.front.in_flight + self.front.waiting})

    async def prometheus(self) -> Response:
        """Return all metrics in Prometheus's text format."""
        stats = await self._stats()
        members = [member for member, _ in self.front.instances()]
        # In a thread: the system walks all pages of a process to compute its size.
        front_bytes, *sizes = await asyncio.to_thread(
            _sizes_of, [member.pid_here for member in members]
        )
        figures = self.metrics.instances
        figures.front_waiting = self.front.waiting
        figures.front_bytes = front_bytes
        figures.instances = {
            member.instance_id: InstanceFigures(
                stats.get(member.instance_id), member.report, member.restarts, size_bytes
            )
            for member, size_bytes in zip(members, sizes, strict=True)
        }
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def memory(self) -> Response:
        """Return the promised memory of the machine and its present users, in bytes.

        The status is 503 while no instance answers.
        """
        stats = await self._stats()
        instances = {
            member.instance_id: InstanceMemory(
                member.report, stats[member.instance_id], member.pid_here
            )
            for member, _ in self.front.instances()
            if member.report is not None and member.instance_id in stats
        }
        if not instances:
            return self._nobody()
        is_one_host = not any(member.host for member, _ in self.front.instances())
        page = memory_page(instances, self.floor_bytes, self.work_bytes, shares_weights=is_one_host)
        return json_response(page)

    async def audit(self) -> Response:
        """Let every instance recount its pages, and return all contradictions.

        The status is 503 while no instance answers.
        """
        audits = await self._stats(with_audit=True)
        if not audits:
            return self._nobody()
        problems = {name: list(stats.problems or ()) for name, stats in audits.items()}
        return json_response({"clean": not any(problems.values()), "problems": problems})

    async def on_reset(self) -> Response:
        """Let every instance evict its cached prefixes; a body is not read.

        Only pages that requests in progress use stay, and later requests may hit them.  The status
        is 503 while no instance serves.
        """
        if not self.front.forget_prefixes():
            return self._nobody()
        return json_response({})

    def _nobody(self) -> Response:
        return json_response({"error": f"no instance answers now ({self.front.state})"}, 503)

    async def _stats(self, *, with_audit: bool = False) -> dict[str, Stats]:
        """Return the statistics of the instances that answer within ``STATS_SECONDS``."""
        try:
            return await self.front.stats(STATS_SECONDS, with_audit=with_audit)
        except TryLater:
            return {}


def _sizes_of(pids: Sequence[int | None]) -> list[int]:
    """Return the bytes of this process, then of each instance; 0 without a process here."""
    return [process_bytes(), *(tree_bytes(pid) if pid else 0 for pid in pids)]
