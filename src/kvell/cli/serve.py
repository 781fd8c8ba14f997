"""``kvell serve``: the OpenAI API over HTTP."""

import json
import os
import sys

import click

from kvell.cli.faults import CHANGE
from kvell.cli.options import engine_options, json_option
from kvell.cli.progress import progress_bar
from kvell.cli.session import EngineSettings, Session


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--api-key", help="Clients must send it; without one, all are served.")
@json_option
@engine_options
@click.pass_obj
def serve(
    session: Session,
    /,
    settings: EngineSettings,
    host: str,
    port: int,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Serve the OpenAI API over HTTP."""
    with progress_bar("loading the tokenizer") as report:
        from kvell.cli.served_text import ServedText
        from kvell.models.named_models import named_sources
        from kvell.server.instance_process import InstanceStartError
        from kvell.server.run import ServeOptions
        from kvell.server.run import serve as serve_http

        named_sources(settings.model, settings.beside)
        text, *others = [
            ServedText.load(model, session.cache_dir, report)
            for model in (settings.model, *settings.beside)
        ]
    announce = _announce_json if as_json else _announce
    command = instance_command(settings, debug=session.debug.on)
    try:
        serve_http(command, text, ServeOptions(host, port, api_key), announce, others)
    except InstanceStartError as error:
        if error.exit_code != CHANGE:
            raise
        # The instance has told the user on stderr what to change.
        raise click.exceptions.Exit(CHANGE) from error


def _announce(url: str) -> None:
    click.echo(f"kvell: serving {url}/v1 (Ctrl-C ends it)", err=True)


def _announce_json(url: str) -> None:
    click.echo(json.dumps({"url": url, "pid": os.getpid()}))
    sys.stdout.flush()


INHERITED = ("--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}")
"""What the front fills in at each start of an instance."""


def instance_command(settings: EngineSettings, *, debug: bool = False) -> list[str]:
    """The command line of an instance process; the front fills in what is in braces."""
    command = [sys.executable, "-m", "kvell.cli.main", "instance", *settings.flags()]
    return [*command, *(["--debug"] if debug else []), *INHERITED]
