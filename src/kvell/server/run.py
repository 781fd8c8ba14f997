"""From a command line and a tokenizer to a server that runs until a signal ends it."""

import asyncio
import errno
import gc
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from kvell.errors import ChangeSomething
from kvell.front.affinity import Affinity
from kvell.front.front import Front
from kvell.mempool.rendezvous import SECRET_BYTES
from kvell.server.api.serve_options import ServeOptions
from kvell.server.http.connections_that_fit import connections_that_fit
from kvell.server.logs.lines import tell
from kvell.server.logs.statistics import Statistics, statistics_lines
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.metrics.memory_page import contract_lines
from kvell.server.serving_keys import ServingKeys
from kvell.server.text.text_model import Texts

if TYPE_CHECKING:
    from kvell.fleet.fleet import Joins
    from kvell.front.events.publisher import EventsPublisher
    from kvell.server.access.visit import VisitTracer
    from kvell.server.http_face import HttpFace

logger = logging.getLogger(__name__)

__all__ = ["ServeOptions", "Texts", "bind", "serve"]


def serve(
    command: Sequence[str],
    texts: Texts,
    options: ServeOptions | None = None,
    announce: Callable[[str], None] = lambda url: None,
    show_contract: Callable[[Sequence[str]], None] = lambda lines: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then running requests may end within the deadline.

    :param command: the instance's command line, with an argument ``{socket_fd}``.
    :param texts: of the models that it serves; read while it starts.
    :param announce: is called with the server's URL once it answers.
    :param show_contract: is called before with the memory contract of several instances.
    :raises ChangeSomething: when the address cannot be bound, keys or a tokenizer not be read,
        traces not be exported, or hardly any connection be opened.
    :raises InstanceStartError: when the instance does not become ready.
    """
    options = _with_descriptors(options or ServeOptions())
    keys = ServingKeys(options)
    # Bound before the instance loads its weights, so that a port in use is said at once.
    with bind(options.host, options.port) as listener, _traced(options) as tracer:
        _warn_if_open(listener, keys)
        asyncio.run(
            _serve(command, texts, options, keys, tracer, listener, announce, show_contract)
        )


def _with_descriptors(options: ServeOptions) -> ServeOptions:
    """Allow as many connections as are asked for, or as there are descriptors for."""
    instances = sum(options.instances.values())
    fit = connections_that_fit(options.http.max_connections, instances)
    return replace(options, http=replace(options.http, max_connections=fit))


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


def _warn_if_open(listener: socket.socket, keys: ServingKeys) -> None:
    """Say it where everybody who reaches this machine may ask."""
    host = listener.getsockname()[0]
    if keys.ring.is_empty and not ipaddress.ip_address(host).is_loopback:
        remedy = "give --api-key or --api-key-file, or listen on 127.0.0.1"
        tell(logger, logging.WARNING, "open_to_the_network", host=host, remedy=remedy)


def _refused_address(host: str, port: int, error: Exception) -> ChangeSomething:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return ChangeSomething("port", port, "is in use", f"try --port {port + 1}")
    if code == errno.EADDRNOTAVAIL:
        return ChangeSomething("host", host, "is not this machine's", "use 127.0.0.1")
    return ChangeSomething("port", port, f"cannot be used ({error})", "use 8000")


async def _serve(
    command: Sequence[str],
    texts: Texts,
    options: ServeOptions,
    keys: ServingKeys,
    tracer: "VisitTracer | None",
    listener: socket.socket,
    announce: Callable[[str], None],
    show_contract: Callable[[Sequence[str]], None],
) -> None:
    metrics = ServerMetrics(",".join(texts.names))
    joins = _joins(command, options, keys)
    loading = asyncio.create_task(asyncio.to_thread(_face, texts, options))
    try:
        async with (
            _published(options) as published,
            Front(
                command,
                instances=options.instances,
                routing=options.routing,
                limits=options.limits,
                observer=metrics,
                place=Affinity() if joins is None else None,
                joins=joins,
                index_observer=published,
                pool=options.pool,
            ) as front,
        ):
            face = await loading
            server = face.server(front, metrics, keys, tracer)
            face.tell_sampling_defaults()
            _listen(listener, options)
            gc.freeze()  # as in the instance: tokenizers and web frameworks are many objects
            if contract := _contract(front, face.most_bytes(front)):
                show_contract(contract)
            announce(_url(listener))
            served = {"url": _url(listener), "models": metrics.model_name, "keys": len(keys.ring)}
            tell(logger, logging.INFO, "server_started", **served)
            async with statistics_lines(Statistics(front, metrics), options.stats_seconds):
                await server.serve(sockets=[listener])
            tell(logger, logging.INFO, "server_ending")
    finally:
        # What the instance says of a model is said; the tokenizer's complaint would repeat it.
        await asyncio.gather(loading, return_exceptions=True)


def _traced(options: ServeOptions) -> "AbstractContextManager[VisitTracer | None]":
    """Who follows requests, if that is asked for; else nothing of it is even imported."""
    if options.otlp_traces_endpoint is None:
        return nullcontext()
    from kvell.server.tracing.opening import traces_to

    return traces_to(options.otlp_traces_endpoint)


def _joins(command: Sequence[str], options: ServeOptions, keys: ServingKeys) -> "Joins | None":
    """The cluster that has the instances, if they are not here; else nothing of it is imported.

    :raises ChangeSomething: when Ray is not installed.
    """
    if options.cluster is None:
        return None
    from kvell.fleet.followed.followed_members import FollowedCluster
    from kvell.fleet.manager.settings import ClusterSettings
    from kvell.fleet.placing.opening import manager_finder

    settings = ClusterSettings(
        *(options.cluster_name, tuple(command), dict(options.instances)),
        *(options.limits, options.pool, secrets.token_bytes(SECRET_BYTES)),
    )
    return FollowedCluster(manager_finder(options.cluster, settings), key_uses=keys.shared())


@asynccontextmanager
async def _published(options: ServeOptions) -> AsyncIterator["EventsPublisher | None"]:
    """Who publishes what instances cache, if that is asked for.

    :raises ChangeSomething: when ZeroMQ is not installed, or an address cannot be used.
    """
    if options.kv_events is None:
        yield None
        return
    try:
        from kvell.front.events.publisher import EventsPublisher
    except ImportError as error:
        problem, remedy = f"needs pyzmq ({error})", "pip install 'kvell[events]'"
        raise ChangeSomething("kv_events_config", "zmq", problem, remedy) from error
    async with EventsPublisher(options.kv_events) as publisher:
        # Whoever listens reads the tokens of prompts.
        tell(logger, logging.INFO, "kv_events_published", endpoint=publisher.endpoint)
        yield publisher


def _contract(front: Front, front_bytes: int) -> list[str]:
    """Every process and the whole, where there are several instances."""
    told = {one.instance_id: one.ready.memory for one, _ in front.instances() if one.ready}
    is_one_host = not any(one.host for one, _ in front.instances())
    lines = contract_lines(told, front_bytes, shares_weights=is_one_host)
    alone_tokens, reach_tokens = front.ready.max_model_len, front.reach_tokens()
    if reach_tokens > alone_tokens:
        lent = f"{reach_tokens:,} while the others lend all that they can"
        lines.append(f"longest request: {alone_tokens:,} tokens, and {lent}")
    if front.ready.staying:
        with_it = f"with {front.ready.staying} none helps another that is short of memory"
        lines.append(f"requests stay at the instance that has them: {with_it}")
    return lines if len(told) > 1 else []


def _face(texts: Texts, options: ServeOptions) -> "HttpFace":
    """All that this process needs beside the instance, whose own start takes longer."""
    # Imported here, in a thread, for that reason.
    from kvell.server.http_face import HttpFace

    return HttpFace(texts.load(), options)


def _listen(listener: socket.socket, options: ServeOptions) -> None:
    try:
        listener.listen(1024)
    except OSError as error:  # another process bound the same port and listened first
        raise _refused_address(options.host, options.port, error) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
