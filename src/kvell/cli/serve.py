"""``kvell serve``: the OpenAI API over HTTP."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import click

from kvell.cli.cluster.ray_address import check_cluster, check_name, running_cluster
from kvell.cli.terminal.environment import tell_service_manager
from kvell.cli.terminal.faults import CHANGE
from kvell.cli.terminal.options import (
    engine_command,
    engine_options,
    record_options,
    with_shared_kv_memory,
)
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, collect_rarely
from kvell.cli.terminal.signals import interruptible
from kvell.cli.terminal.stderr import stderr_to
from kvell.cluster.instances import check_start
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.models.sources.progress import Progress
from kvell.server.answers.named import check_parsers
from kvell.server.api.serve_options import ServeOptions
from kvell.server.logs.lines import LogFormat, lines_on, tell
from kvell.server.text.named_texts import TextOptions

if TYPE_CHECKING:
    from kvell.server.text.text_model import Texts

logger = logging.getLogger(__name__)


@engine_command
@record_options(ServeOptions, "options")
@record_options(TextOptions, "templates")
@click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="text",
    show_default=True,
    help="Form of the log's lines on stderr.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the server's address and pid as JSON on stdout.",
)
@engine_options
@click.pass_obj
def serve(
    session: Session,
    /,
    settings: EngineSettings,
    options: ServeOptions,
    templates: TextOptions,
    log_format: LogFormat,
    as_json: bool,
) -> None:
    """Serve the OpenAI API over HTTP."""
    check_start(options.instances)
    options = replace(options, pool=options.pool.resolve(options.instances))
    check_parsers(options.tool_call_parser, options.reasoning_parser)
    if options.otlp_traces_endpoint is not None:
        from kvell.server.tracing.opening import checked_endpoint

        checked_endpoint(options.otlp_traces_endpoint)
    instances = sum(options.instances.values())
    cluster = options.cluster
    if cluster is None:
        settings = with_shared_kv_memory(settings, session, instances)
    else:
        check_cluster(cluster)
        check_name(options.cluster_name)
    with progress_bar("looking for the model") as report:
        from kvell.fleet.instance.command import instance_command, placed_command
        from kvell.fleet.instance.instance_process import InstanceStartError
        from kvell.server.run import serve as serve_http
        from kvell.server.text.named_texts import texts_of

        texts = texts_of(
            (settings.model, *settings.beside),
            session.cache_dir,
            report,
            templates,
            served_names=options.face.served_names,
            hf_overrides=settings.overrides_json,
            tokenizer=settings.tokenizer,
        )
        if cluster is None:
            _check_settings(settings, texts, session, report, instances)
    logs_json = log_format == "json"  # then stderr must have JSON lines only
    announce = _announce_json if as_json else (lambda _url: None) if logs_json else _announce
    show_contract = _log_contract if logs_json else _show_contract
    make_command = instance_command if cluster is None else placed_command
    command = make_command(settings, options.prices, debug=session.debug.on)
    try:
        with _logged(log_format), interruptible(), running_cluster(cluster) as address:
            _log_notes(session)
            options = replace(options, cluster=address)
            ready = _ready(announce, collect_rarely())
            serve_http(command, texts, options, ready, show_contract)
    except InstanceStartError as error:
        if error.exit_code != CHANGE:
            raise
        if cluster is not None:  # its stderr is on another machine
            click.echo(f"kvell: {error}", err=True)
        # Otherwise the instance has already written the error to this stderr.
        raise click.exceptions.Exit(CHANGE) from error


@contextmanager
def _logged(log_format: LogFormat) -> Iterator[None]:
    """Write the log and all other output on stderr in a thread while the block runs."""
    with lines_on(sys.stderr, log_format) as log, stderr_to(log):
        yield


def _check_settings(
    settings: EngineSettings, texts: "Texts", session: Session, progress: Progress, instances: int
) -> None:
    """Check the settings of instances once, before any of them starts.

    A single instance checks them itself if reading its config would delay its start.

    :raises ChangeSomething: naming the setting that cannot work.
    """
    from kvell.engine.unloaded import check_named
    from kvell.models.families.plain_config import plain_config
    from kvell.models.sources.source import resolve_as

    draft_path = None
    if settings.speculative_model is not None:
        draft_path = resolve_as(
            "speculative_model", settings.speculative_model, session.cache_dir, progress
        )
    paths = [*texts.paths, *([] if draft_path is None else [draft_path])]
    if instances > 1 or all(plain_config(path) is not None for path in paths):
        named = list(zip(texts.names, texts.paths, strict=True))
        check_named(settings, named, draft_path, session.available_bytes() // instances)


def _ready(
    announce: Callable[[str], None], collect_as_usual: Callable[[], None]
) -> Callable[[str], None]:
    def announced(url: str) -> None:
        collect_as_usual()
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


def _announce(url: str) -> None:
    click.echo(f"kvell: serving {url}/v1 (Ctrl-C ends it)", err=True)


def _announce_json(url: str) -> None:
    click.echo(json.dumps({"url": url, "pid": os.getpid()}))
    sys.stdout.flush()
