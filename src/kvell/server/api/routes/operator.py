"""``/health``, ``/metrics``, ``/debug/memory`` and ``/debug/audit``: for operators."""

from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

from kvell.engine.protocol.messages import Stats
from kvell.errors import TryLater
from kvell.server.api.bodies.completions import json_response
from kvell.server.front.front import Front
from kvell.server.metrics.front_metrics import CONTENT_TYPE, ServerMetrics
from kvell.server.metrics.instance_metrics import InstanceFigures
from kvell.server.metrics.memory_page import InstanceMemory, memory_page

STATS_SECONDS = 2.0


@dataclass(frozen=True)
class OperatorApi:
    """The handlers.

    :param metrics: the observer that was given to the front.
    :param floor_bytes: of this process before it served anything.
    """

    front: Front
    metrics: ServerMetrics
    floor_bytes: int

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/health", self.health, methods=["GET"])
        text = PlainTextResponse
        app.add_api_route("/metrics", self.prometheus, methods=["GET"], response_class=text)
        app.add_api_route("/debug/memory", self.memory, methods=["GET"])
        app.add_api_route("/debug/audit", self.audit, methods=["GET"])

    async def health(self) -> Response:
        """``/health``: 200 while an instance serves, else 503."""
        status = 200 if self.front.state == "serving" else 503
        return json_response({"status": self.front.state}, status)

    async def prometheus(self) -> Response:
        """``/metrics``."""
        told = await self._stats()
        self.metrics.instances.front_waiting = self.front.waiting
        self.metrics.instances.instances = {
            one.instance_id: InstanceFigures(told.get(one.instance_id), one.ready, one.restarts)
            for one, _ in self.front.instances()
        }
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def memory(self) -> Response:
        """``/debug/memory``; 503 while no instance answers."""
        told = await self._stats()
        known = {
            one.instance_id: InstanceMemory(one.ready, told[one.instance_id], one.pid)
            for one, _ in self.front.instances()
            if one.ready is not None and one.instance_id in told
        }
        if not known:
            return self._nobody()
        return json_response(memory_page(known, self.floor_bytes))

    async def audit(self) -> Response:
        """``/debug/audit``: every contradiction that instances find; 503 while none answers."""
        told = await self._stats(with_audit=True)
        if not told:
            return self._nobody()
        problems = {name: list(stats.problems or ()) for name, stats in told.items()}
        return json_response({"clean": not any(problems.values()), "problems": problems})

    def _nobody(self) -> Response:
        return json_response({"error": f"no instance answers just now ({self.front.state})"}, 503)

    async def _stats(self, *, with_audit: bool = False) -> dict[str, Stats]:
        """What each instance says within a bounded time; those that are silent are left out."""
        try:
            return await self.front.stats(STATS_SECONDS, with_audit=with_audit)
        except TryLater:
            return {}
