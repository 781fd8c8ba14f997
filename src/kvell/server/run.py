"""From a command line and a tokenizer to a server that runs until a signal ends it."""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from kvell.errors import ChangeSomething
from kvell.server.front import Front, FrontLimits
from kvell.server.metrics import ServerMetrics
from kvell.server.openai_api import MAX_BODY_BYTES, build_app
from kvell.server.text_model import TextModel


@dataclass(frozen=True)
class ServeOptions:
    """Where and within which bounds to serve.

    :param port: 0 takes any free port.
    :param api_key: when given, ``/v1/`` answers only to it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    limits: FrontLimits = field(default_factory=FrontLimits)


def serve(
    command: Sequence[str],
    model: TextModel,
    options: ServeOptions | None = None,
    announce: Callable[[str], None] = lambda url: None,
    beside: Sequence[TextModel] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; then running requests may end within the deadline.

    :param command: the instance's command line, with an argument ``{socket_fd}``.
    :param model: the first that the instance serves; ``beside`` are the others, in order.
    :param announce: is called with the server's URL once it answers.
    :raises ChangeSomething: when the address cannot be bound.
    :raises InstanceStartError: when the instance does not become ready.
    """
    options = options or ServeOptions()
    # Bound before the instance loads its weights, so that a port in use is said at once.
    with bind(options.host, options.port) as listener:
        asyncio.run(_serve(command, (model, *beside), options, listener, announce))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    :raises ChangeSomething: naming ``port`` or ``host``.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol said, asyncio turns Nagle's algorithm off: else the first token of a new
        # connection waits behind its head for the client's delayed acknowledgement, 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        raise ChangeSomething("host", host, f"is no address ({error})", "use 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _refused_address(host, port, error) from error
    return listener


def _refused_address(host: str, port: int, error: Exception) -> ChangeSomething:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return ChangeSomething("port", port, "is in use", f"try --port {port + 1}")
    if code == errno.EADDRNOTAVAIL:
        return ChangeSomething("host", host, "is not this machine's", "use 127.0.0.1")
    return ChangeSomething("port", port, f"cannot be used ({error})", "use 8000")


async def _serve(
    command: Sequence[str],
    models: Sequence[TextModel],
    options: ServeOptions,
    listener: socket.socket,
    announce: Callable[[str], None],
) -> None:
    metrics = ServerMetrics(",".join(model.name for model in models))
    async with Front(command, limits=options.limits, observer=metrics) as front:
        app = build_app(
            front,
            models[0],
            metrics,
            api_key=options.api_key,
            max_body_bytes=options.max_body_bytes,
            beside=models[1:],
        )
        server = _Server(_config(app, options.limits.drain_seconds))
        _listen(listener, options)
        announce(_url(listener))
        await server.serve(sockets=[listener])


def _listen(listener: socket.socket, options: ServeOptions) -> None:
    try:
        listener.listen(1024)
    except OSError as error:  # another process bound the same port and listened first
        raise _refused_address(options.host, options.port, error) from error


def _config(app: FastAPI, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Uvicorn that ends quietly: its own handlers raise the signal again when done,
    which would kill the process before the instance is drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # outside the main thread
                loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
