"""``kvell serve``: the OpenAI API over HTTP."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import click

from kvell.cli.cluster.ray_address import check_cluster, check_name, running_cluster
from kvell.cli.serve_options import (
    access_options,
    answer_options,
    cluster_options,
    connection_options,
    events_option,
    face_options,
    log_options,
    template_options,
)
from kvell.cli.terminal.environment import tell_service_manager
from kvell.cli.terminal.faults import CHANGE
from kvell.cli.terminal.options import (
    engine_command,
    engine_options,
    json_option,
    with_shared_kv_memory,
)
from kvell.cli.terminal.pool_options import (
    adaptive_roles_option,
    pd_caching_option,
    routing_option,
)
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.signals import interruptible
from kvell.cluster.instances import (
    check_adaptive_roles,
    check_start,
    chosen_pd_caching,
    parse_instances,
)
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.events.events_config import parse_events_config
from kvell.mempool.rendezvous import PageTransport, PdCaching
from kvell.models.sources.progress import Progress
from kvell.server.answers.named import check_parsers
from kvell.server.api.door.face_options import FaceOptions
from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.logs.lines import LogFormat, lines_on, tell

if TYPE_CHECKING:
    from kvell.server.text.text_model import Texts

logger = logging.getLogger(__name__)


@engine_command
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@access_options
@connection_options
@log_options
@answer_options
@template_options
@face_options
@events_option
@click.option(
    "--instances",
    metavar="ROLE=N",
    default="mixed=1",
    show_default=True,
    help="Engines behind this server, each with its own KV pool.",
)
@routing_option
@pd_caching_option
@adaptive_roles_option
@click.option(
    "--page-transport",
    type=click.Choice(get_args(PageTransport)),
    default="memory",
    show_default=True,
    help="How pages move between instances: through shared memory, or over TCP.",
)
@cluster_options
@partial(json_option, text="Print the server's address and pid as JSON on stdout.")
@engine_options
@click.pass_obj
def serve(
    session: Session,
    /,
    settings: EngineSettings,
    host: str,
    port: int,
    access: Mapping[str, Any],
    answers: Mapping[str, Any],
    face: FaceOptions,
    templates: Mapping[str, Any],
    max_connections: int,
    keep_alive_seconds: int,
    log_format: LogFormat,
    logs: Mapping[str, Any],
    instances: str,
    routing: str,
    pd_caching: PdCaching | None,
    adaptive_roles: bool,
    page_transport: PageTransport,
    cluster: str | None,
    cluster_name: str,
    kv_events_config: str | None,
    as_json: bool,
) -> None:
    """Serve the OpenAI API over HTTP."""
    counts = parse_instances(instances)
    pool = _pool_settings(counts, pd_caching, page_transport, adaptive_roles=adaptive_roles)
    check_parsers(answers["tool_call_parser"], answers["reasoning_parser"])
    if logs["otlp_traces_endpoint"] is not None:
        from kvell.server.tracing.opening import checked_endpoint

        checked_endpoint(logs["otlp_traces_endpoint"])
    kv_events = None if kv_events_config is None else parse_events_config(kv_events_config)
    if cluster is None:
        settings = with_shared_kv_memory(settings, session, sum(counts.values()))
    else:
        check_cluster(cluster)
        check_name(cluster_name)
    with progress_bar("looking for the model") as report:
        from kvell.fleet.instance.command import instance_command, placed_command
        from kvell.fleet.instance.instance_process import InstanceStartError
        from kvell.server.run import ServeOptions
        from kvell.server.run import serve as serve_http
        from kvell.server.text.named_texts import texts_of

        models = (settings.model, *settings.beside)
        own = {"hf_overrides": settings.overrides_json, "tokenizer": settings.tokenizer}
        more = {**templates, **own}
        texts = texts_of(models, session.cache_dir, report, served_names=face.served_names, **more)
        if cluster is None:
            _check_settings(settings, texts, session, report, sum(counts.values()))
    options = ServeOptions(
        host,
        port,
        instances=counts,
        routing=routing,
        kv_events=kv_events,
        pool=pool,
        cluster_name=cluster_name,
        http=HttpBounds(max_connections, keep_alive_seconds),
        face=face,
        **access,
        **answers,
        **logs,
    )
    logs_json = log_format == "json"  # then stderr must have JSON lines only
    announce = _announce_json if as_json else _say_nothing if logs_json else _announce
    show_contract = _log_contract if logs_json else _show_contract
    make_command = instance_command if cluster is None else placed_command
    command = make_command(settings, debug=session.debug.on)
    try:
        with lines_on(sys.stderr, log_format), interruptible(), running_cluster(cluster) as address:
            _log_notes(session)
            options = replace(options, cluster=address)
            serve_http(command, texts, options, _ready(announce), show_contract)
    except InstanceStartError as error:
        if error.exit_code != CHANGE:
            raise
        if cluster is not None:  # its stderr is on another machine
            click.echo(f"kvell: {error}", err=True)
        # Otherwise the instance has already written the error to this stderr.
        raise click.exceptions.Exit(CHANGE) from error


def _pool_settings(
    counts: Mapping[str, int],
    pd_caching: PdCaching | None,
    page_transport: PageTransport,
    *,
    adaptive_roles: bool,
) -> PoolSettings:
    """Return the settings of the instances' pool.

    :raises ChangeSomething: if they do not suit the roles of the instances.
    """
    check_start(counts)
    if adaptive_roles:
        check_adaptive_roles(counts, "--adaptive-roles")
    caching = chosen_pd_caching(counts, pd_caching, "--pd-caching")
    return PoolSettings(caching, page_transport, adaptive_roles)


def _check_settings(
    settings: EngineSettings, texts: "Texts", session: Session, progress: Progress, instances: int
) -> None:
    """Check the settings of instances once, before any of them starts.

    A single instance checks them itself if reading its config would delay its start.

    :raises ChangeSomething: naming the setting that cannot work.
    """
    from kvell.engine.unloaded import check_named
    from kvell.models.families.plain_config import plain_config
    from kvell.models.sources.source import resolve_draft

    draft_path = None
    if settings.speculative_model is not None:
        draft_path = resolve_draft(settings.speculative_model, session.cache_dir, progress)
    paths = [*texts.paths, *([] if draft_path is None else [draft_path])]
    if instances > 1 or all(plain_config(path) is not None for path in paths):
        named = list(zip(texts.names, texts.paths, strict=True))
        check_named(settings, named, draft_path, session.available_bytes() // instances)


def _ready(announce: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that announces the server, also to systemd."""

    def announced(url: str) -> None:
        announce(url)
        tell_service_manager("READY=1")

    return announced


def _log_notes(session: Session) -> None:
    """Log notes about flags; with a log of text, they have been printed."""
    for sentence in session.notes:
        tell(logger, logging.INFO, "flag_without_effect", note=sentence)


def _show_contract(lines: Sequence[str]) -> None:
    click.echo("\n".join(lines), err=True)


def _log_contract(lines: Sequence[str]) -> None:
    tell(logger, logging.INFO, "memory_contract", lines=list(lines))


def _say_nothing(_url: str) -> None:
    """Print nothing: the log has the event ``server_started``."""


def _announce(url: str) -> None:
    click.echo(f"kvell: serving {url}/v1 (Ctrl-C ends it)", err=True)


def _announce_json(url: str) -> None:
    click.echo(json.dumps({"url": url, "pid": os.getpid()}))
    sys.stdout.flush()
