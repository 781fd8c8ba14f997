"""The HTTP side of a server: its app, and uvicorn around it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from kvell.server.access.visit import VisitTracer
from kvell.server.api.access_guard import Access
from kvell.server.api.openai_api import build_app
from kvell.server.api.serve_options import ServeOptions
from kvell.server.front.front import Front
from kvell.server.logs.visits import VisitLines
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.serving_keys import ServingKeys
from kvell.server.text.text_model import LoadedTexts


class HttpFace:
    """What is ready before the instance is.

    :param texts: in the instance's order.
    """

    def __init__(self, texts: LoadedTexts, options: ServeOptions) -> None:
        self._texts, self._options = texts, options

    @property
    def floor_bytes(self) -> int:
        """Of this process before it loaded anything."""
        return self._texts.floor_bytes

    def server(
        self,
        front: Front,
        metrics: ServerMetrics,
        keys: ServingKeys,
        tracer: VisitTracer | None = None,
    ) -> uvicorn.Server:
        """Around a started front."""
        tells = self._options.log_requests
        visits = VisitLines(tells_requests=tells, count=metrics.answered_over_http)
        first, *beside = self._texts.models
        app = build_app(
            front,
            first,
            metrics,
            access=Access(keys.ring, self._options.guard_metrics, visits, tracer=tracer),
            max_body_bytes=self._options.max_body_bytes,
            beside=beside,
            floor_bytes=self._texts.floor_bytes,
            tool_call_parser=self._options.tool_call_parser,
            reasoning_parser=self._options.reasoning_parser,
        )
        reads_again = keys.reload if self._options.api_key_file is not None else None
        return _Server(_config(app, self._options.limits.drain_seconds), reads_again)


def _config(app: FastAPI, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,  # whoever runs this decides where lines go
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )


class _Server(uvicorn.Server):
    """Uvicorn that ends quietly: its own handlers raise the signal again when done,
    which would kill the process before the instance is drained.

    :param on_hangup: is called at SIGHUP; without it that signal ends the process.
    """

    def __init__(self, config: uvicorn.Config, on_hangup: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_hangup = on_hangup

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
