"""The run of a server, from its start until a signal ends it."""

import asyncio
import errno
import gc
import ipaddress
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from kvell.device.open_files import allow_open_files
from kvell.engine.setup.contract import in_columns
from kvell.errors import ChangeSomething
from kvell.front.front import Affinity, Front
from kvell.mempool.rendezvous import SECRET_BYTES
from kvell.server.api.serve_options import ServeOptions
from kvell.server.logs.lines import tell
from kvell.server.logs.statistics import Statistics, statistics_lines
from kvell.server.map.recorder import HistoryRecorder
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.metrics.instance_metrics import contract_lines, price_lines
from kvell.server.serving_keys import ServingKeys
from kvell.server.text.text_model import Texts

if TYPE_CHECKING:
    from kvell.fleet.followed.followed_members import FollowedCluster
    from kvell.front.events.publisher import EventsPublisher
    from kvell.server.access.traced_visit import Tracer
    from kvell.server.http_face import HttpFace

RESERVED = 96
"""Descriptors not for connections: libraries, logs, listeners, sockets that are closing."""
RESERVED_PER_INSTANCE = 8
"""Descriptors of an instance's connection, pipes and memory, and those of its replacement."""
FEWEST = 16


def connections_that_fit(requested: int, instances: int) -> int:
    """Raise the limit of open files as needed; return the number of connections that fit.

    A quarter of the limit is never used for connections, since instances may be added.

    :raises ChangeSomething: when the limit is too low to serve at all.
    """
    reserved = RESERVED + RESERVED_PER_INSTANCE * instances
    wanted = max(requested + reserved, -(-requested * 4 // 3))
    open_files = allow_open_files(wanted)
    fit = min(requested, open_files - max(reserved, open_files // 4))
    if fit < FEWEST:
        problem = f"leaves too few connections, for {open_files} files may be open"
        remedy = (
            f"ask for {FEWEST} or more, under a limit of {reserved + FEWEST} or more (ulimit -n)"
        )
        raise ChangeSomething("max_connections", requested, problem, remedy)
    if fit < requested:
        limits = {"asked": requested, "allowed": fit, "open_files": open_files}
        tell(logger, logging.WARNING, "fewer_connections", **limits)
    return fit


logger = logging.getLogger(__name__)

__all__ = ["ServeOptions", "Texts", "bind", "serve"]


def serve(
    command: Sequence[str],
    texts: Texts,
    options: ServeOptions | None = None,
    announce: Callable[[str], None] = lambda url: None,
    show_contract: Callable[[Sequence[str]], None] = lambda lines: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then running requests may end within the drain time.

    :param command: the instance's command line, with an argument ``{socket_fd}``.
    :param texts: text sides of its models; loaded while the instance starts.
    :param announce: called with the server's URL once it answers.
    :param show_contract: called before that with the lines of the memory contract.
    :raises ChangeSomething: when the address cannot be bound, keys or a tokenizer cannot be read,
        traces cannot be exported, or too few connections can be opened.
    :raises InstanceStartError: when the instance does not become ready.
    """
    # So long each call of the event loop that lets threads run waits for one that computes. With
    # Python's own 5 ms, a turn of twenty sends stands for 100 ms.
    sys.setswitchinterval(0.0005)
    options = options or ServeOptions()
    fit = connections_that_fit(options.http.max_connections, sum(options.instances.values()))
    options = replace(options, http=replace(options.http, max_connections=fit))
    keys = ServingKeys(options)
    # Bound before the instance loads its weights, so that a port in use is reported immediately.
    with bind(options.host, options.port) as listener, _traced(options) as tracer:
        _warn_if_open(listener, keys)
        asyncio.run(
            _serve(command, texts, options, keys, tracer, listener, announce, show_contract)
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet.

    :raises ChangeSomething: with ``port`` or ``host``.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # With an explicit protocol, asyncio disables Nagle's algorithm.  Otherwise the first token
        # of a new connection waits 40 ms for the client's delayed acknowledgement of the head.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        raise ChangeSomething(
            "host", host, f"is not an address ({error})", "use 127.0.0.1"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _refused_address(host, port, error) from error
    return listener


def _warn_if_open(listener: socket.socket, keys: ServingKeys) -> None:
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
    tracer: "Tracer | None",
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
                seed=options.seed,
            ) as front,
        ):
            face = await loading
            recorder = HistoryRecorder(front, metrics)
            server = face.server(front, metrics, keys, tracer, recorder)
            face.tell_sampling_defaults()
            _listen(listener, options)
            gc.freeze()  # as in the instance: tokenizers and web frameworks are many objects
            show_contract(_contract(front, face.most_bytes(front)))
            served = {"url": _url(listener), "models": metrics.model_name, "keys": len(keys.ring)}
            lines = statistics_lines(Statistics(front, metrics), options.stats_seconds)
            with server.capture_signals():  # whoever reads the announcement may end the server
                announce(_url(listener))
                tell(logger, logging.INFO, "server_started", **served)
                async with lines, recorder.recording():
                    await server.serve(sockets=[listener])
            tell(logger, logging.INFO, "server_ending")
    finally:
        # The instance has reported a faulty model; the tokenizer's error would repeat that.
        await asyncio.gather(loading, return_exceptions=True)


def _traced(options: ServeOptions) -> "AbstractContextManager[Tracer | None]":
    """Return the tracer of requests; its packages are only imported if tracing is enabled."""
    if options.otlp_traces_endpoint is None:
        return nullcontext()
    from kvell.server.tracing.opening import traces_to

    return traces_to(options.otlp_traces_endpoint)


def _joins(
    command: Sequence[str], options: ServeOptions, keys: ServingKeys
) -> "FollowedCluster | None":
    """Return the cluster of the instances; None, without its imports, if they are local.

    :raises ChangeSomething: when Ray is not installed.
    """
    if options.cluster is None:
        return None
    from kvell.fleet.followed.followed_members import FollowedCluster
    from kvell.fleet.manager.settings import ClusterSettings
    from kvell.fleet.placing.opening import manager_finder

    settings = ClusterSettings(
        name=options.cluster_name,
        command=tuple(command),
        counts=dict(options.instances),
        limits=options.limits,
        pool=options.pool,
        secret=secrets.token_bytes(SECRET_BYTES),
    )
    uses = keys.shared_use()
    find = manager_finder(options.cluster, settings)
    return FollowedCluster(find, take_key_uses=uses.take, on_key_uses=uses.on_uses)


@asynccontextmanager
async def _published(options: ServeOptions) -> AsyncIterator["EventsPublisher | None"]:
    """Yield the publisher of the instances' KV events, or None if it is not enabled.

    :raises ChangeSomething: when ZeroMQ is not installed, or an address cannot be used.
    """
    if options.kv_events is None:
        yield None
        return
    try:
        from kvell.front.events.publisher import EventsPublisher
    except ImportError as error:
        problem = f"needs pyzmq ({error})"
        remedy = "pip install 'kvell[events]'"
        raise ChangeSomething("kv_events_config", "zmq", problem, remedy) from error
    async with EventsPublisher(options.kv_events) as publisher:
        # Logged because every subscriber can read the tokens of prompts.
        tell(logger, logging.INFO, "kv_events_published", endpoint=publisher.endpoint)
        yield publisher


def _contract(front: Front, front_bytes: int) -> list[str]:
    reports = {
        instance.instance_id: instance.report
        for instance, _ in front.instances()
        if instance.report
    }
    contracts = {name: report.facts.memory for name, report in reports.items()}
    is_one_host = not any(instance.host for instance, _ in front.instances())
    detail = front.facts.contract_lines if len(contracts) == 1 else ()
    lines = [*detail, *contract_lines(contracts, front_bytes, shares_weights=is_one_host)]
    for name in ("", *front.facts.beside):
        alone_tokens = front.facts.lengths(name).max_model_len
        reach_tokens = front.reach_tokens(name)
        if reach_tokens > alone_tokens:
            title = f"longest to {name}" if name else "longest request"
            reach = f"{alone_tokens:,} tokens; {reach_tokens:,} while others lend"
            lines.append(f"  {title:<18}  {reach}")
    if front.facts.staying and len(contracts) > 1:
        lines.append(f"  lending             off with {front.facts.staying}: requests stay")
    lines += price_lines({name: report.facts for name, report in reports.items()})
    return [part for line in lines for part in in_columns(line)]


def _face(texts: Texts, options: ServeOptions) -> "HttpFace":
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
