"""Routes for operators: probes, ``/load``, ``/metrics``, ``/debug`` and ``/reset_prefix_cache``.

The memory of a server's processes on this machine, read seldom and on a thread of its own.

The system walks all pages of a process to compute its size.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

from kvell.device.available import process_bytes, tree_bytes
from kvell.front.front import Front
from kvell.front.routes import totals_by_target
from kvell.server.api.bodies.completions import JSON_TYPE, json_response
from kvell.server.map.recorder import LatestAnswer
from kvell.server.metrics.front_metrics import CONTENT_TYPE, ServerMetrics, answered_stats
from kvell.server.metrics.instance_metrics import InstanceFigures, memory_page

REFRESH_SECONDS = 1.0


def _sizes_of(pids: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Return the bytes of this process, and those of instances by id."""
    return process_bytes(), {name: tree_bytes(pid) for name, pid in pids.items()}


def _json(body: Mapping[str, object], status: int = 200) -> Callable[[], Response]:
    return partial(Response, msgspec.json.encode(body), status, media_type=JSON_TYPE)


_FiguresPage = Callable[[], Response]
"""Makes the response of a page, for each client that shares the page."""


class OperatorApi:
    """The handlers for operators; all who ask for a page of figures at the same time share it.

    :param floor_bytes: memory of this process before it served anything.
    :param work_bytes: maximum further memory for reading texts and images.
    """

    def __init__(
        self, front: Front, metrics: ServerMetrics, floor_bytes: int, work_bytes: int = 0
    ) -> None:
        self.front, self.metrics = front, metrics
        self._floor_bytes, self._work_bytes = floor_bytes, work_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-process-sizes")
        self._sizes = LatestAnswer(self._measure, front.now_seconds, REFRESH_SECONDS)
        self._metrics = LatestAnswer(self._make_metrics, front.now_seconds)
        self._memory = LatestAnswer(self._make_memory, front.now_seconds)
        self._audit = LatestAnswer(self._make_audit, front.now_seconds)

    def install(self, app: FastAPI) -> None:
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
        """Return all metrics in Prometheus's text format; sizes of processes are a second old."""
        return (await self._metrics.latest())()

    async def memory(self) -> Response:
        """Return the promised memory of the machine and its present users, in bytes.

        Sizes of processes are up to a second old.  The status is 503 while no instance answers.
        """
        return (await self._memory.latest())()

    async def audit(self) -> Response:
        """Let every instance recount its pages, and return all contradictions.

        The status is 503 while no instance answers.
        """
        return (await self._audit.latest())()

    async def on_reset(self) -> Response:
        """Let every instance evict its cached prefixes; a body is not read.

        Only pages that requests in progress use stay, and later requests may hit them.  The status
        is 503 while no instance serves.
        """
        if not self.front.forget_prefixes():
            return self._nobody()()
        return json_response({})

    async def _measure(self) -> tuple[int, dict[str, int]]:
        members = [member for member, _ in self.front.instances()]
        pids = {each.instance_id: each.pid_here for each in members if each.pid_here}
        return await asyncio.get_running_loop().run_in_executor(self._thread, _sizes_of, pids)

    async def _make_metrics(self) -> _FiguresPage:
        figures = self.metrics.instances
        figures.instances = await self._figures()
        figures.front_waiting = self.front.waiting
        figures.front_bytes, _ = await self._sizes.latest()
        return partial(Response, self.metrics.render(), media_type=CONTENT_TYPE)

    async def _figures(self) -> dict[str, InstanceFigures]:
        stats = await answered_stats(self.front)
        _, sizes = await self._sizes.latest()
        transfers = totals_by_target(self.front.entries().transfers)
        return {
            member.instance_id: InstanceFigures(
                stats.get(member.instance_id),
                member.report,
                member.restarts,
                sizes.get(member.instance_id, 0),
                transfers.get(member.instance_id, {}),
            )
            for member, _ in self.front.instances()
        }

    async def _make_memory(self) -> _FiguresPage:
        figures = await self._figures()
        instances = {name: each for name, each in figures.items() if each.report and each.stats}
        if not instances:
            return self._nobody()
        front_bytes, _ = await self._sizes.latest()
        page = memory_page(
            instances,
            self._floor_bytes,
            self._work_bytes,
            front_now_bytes=front_bytes,
            shares_weights=not any(member.host for member, _ in self.front.instances()),
        )
        return _json(page)

    async def _make_audit(self) -> _FiguresPage:
        audits = await answered_stats(self.front, with_audit=True)
        if not audits:
            return self._nobody()
        problems = {name: list(stats.problems or ()) for name, stats in audits.items()}
        body = {"clean": not any(problems.values()), "problems": problems}
        return _json(body)

    def _nobody(self) -> _FiguresPage:
        body = {"error": f"no instance answers now ({self.front.state})"}
        return _json(body, 503)
