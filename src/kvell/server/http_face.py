"""The HTTP side of a server: its app in uvicorn."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import uvicorn
from fastapi import FastAPI

from kvell.engine.sampling.model_defaults import find_recommended
from kvell.front.front import Front
from kvell.server.access.traced_visit import Tracer
from kvell.server.api.door.access_guard import Access
from kvell.server.api.openai_api import build_app
from kvell.server.api.serve_options import ServeOptions
from kvell.server.http.connection import Acceptor, BoundedConnection, Face, OpenConnections
from kvell.server.logs.lines import tell
from kvell.server.logs.visits import VisitLines
from kvell.server.map.recorder import HistoryRecorder
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.serving_keys import ServingKeys
from kvell.server.text.lanes import most_work_bytes
from kvell.server.text.text_model import LoadedTexts

logger = logging.getLogger(__name__)


class HttpFace:
    """The parts of the HTTP server that are loaded before the instance is ready.

    :param texts: text sides of the models, in the instance's order.
    """

    def __init__(self, texts: LoadedTexts, options: ServeOptions) -> None:
        self._texts, self._options = texts, options

    def most_bytes(self, front: Front) -> int:
        first, *beside = self._texts.models
        return self._texts.floor_bytes + most_work_bytes(front.facts, first, beside)

    def tell_sampling_defaults(self) -> None:
        for model in self._texts.models:
            if taken := find_recommended(model.sampling_defaults):
                tell(logger, logging.INFO, "sampling_defaults", model=model.name, **taken)

    def server(
        self,
        front: Front,
        metrics: ServerMetrics,
        keys: ServingKeys,
        tracer: Tracer | None = None,
        recorder: HistoryRecorder | None = None,
    ) -> uvicorn.Server:
        tells = self._options.log_requests
        visits = VisitLines(tells_requests=tells, count=metrics.answered_over_http)
        first, *beside = self._texts.models
        face = self._options.face
        app = build_app(
            front,
            first,
            metrics,
            access=Access(keys.ring, self._options.guard_metrics, visits, tracer=tracer),
            max_body_bytes=self._options.max_body_bytes,
            http=self._options.http,
            beside=beside,
            floor_bytes=self._texts.floor_bytes,
            tool_call_parser=self._options.tool_call_parser,
            reasoning_parser=self._options.reasoning_parser,
            face=replace(face, allowed_hosts=(self._options.host, *face.allowed_hosts)),
            recorder=recorder,
        )
        reads_again = keys.reload if self._options.api_key_file is not None else None
        open_connections = OpenConnections[BoundedConnection](self._options.http.max_connections)
        metrics.watch_connections(open_connections.count)
        made = Face(self._options.http, open_connections, metrics)
        return _Server(_config(app, self._options.limits.drain_seconds), made, reads_again)


def _config(app: FastAPI, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,  # the command line configures logs
        log_level="error",  # uvicorn would log a warning for each invalid request
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )


class _Server(uvicorn.Server):
    """A uvicorn server with bounded connections and its own signal handlers.

    Uvicorn's handlers raise the signal again at the end, which would kill the process before the
    instance is drained.

    :param on_hangup: called at SIGHUP; None: SIGHUP ends the process.
    """

    def __init__(
        self, config: uvicorn.Config, face: Face, on_hangup: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._face, self._on_hangup = face, on_hangup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        make = partial(
            BoundedConnection, self._face, self.config, self.server_state, self.lifespan.state
        )
        acceptors = [Acceptor(listener, self._face, make) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment] # they have the methods that are called
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # outside the main thread
                loop.add_signal_handler(number, self.handle_exit, number, None)
        if self._on_hangup is not None:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        yield
