"""``kvell serve``: the OpenAI API over HTTP."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvell.cli.terminal.faults import CHANGE
from kvell.cli.terminal.options import engine_options, json_option
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import EngineSettings, Session
from kvell.models.sources.progress import Progress

if TYPE_CHECKING:
    from kvell.server.text.text_model import Texts


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
    with progress_bar("looking for the model") as report:
        from kvell.server.instance.instance_process import InstanceStartError
        from kvell.server.run import ServeOptions
        from kvell.server.run import serve as serve_http

        texts = texts_of((settings.model, *settings.beside), session.cache_dir, report)
    announce = _announce_json if as_json else _announce
    command = instance_command(settings, debug=session.debug.on)
    try:
        serve_http(command, texts, ServeOptions(host, port, api_key), announce)
    except InstanceStartError as error:
        if error.exit_code != CHANGE:
            raise
        # The instance has told the user on stderr what to change.
        raise click.exceptions.Exit(CHANGE) from error


def texts_of(models: Sequence[str], cache_dir: Path, progress: Progress) -> "Texts":
    """Return the models' names, and a loader of their tokenizers to call while the instance starts.

    :raises ChangeSomething: if a model cannot be found, or two have the same name.
    """
    from kvell.models.sources.named_sources import named_sources
    from kvell.models.sources.source import resolve_model
    from kvell.server.text.text_model import LoadedTexts, Texts

    named = named_sources(models[0], models[1:])
    paths = [resolve_model(one.source, cache_dir, progress) for one in named]

    def load() -> LoadedTexts:
        from kvell.cli.served_text import ServedText
        from kvell.device.process_size import give_back_freed, process_bytes

        floor_bytes = process_bytes()
        read = [ServedText.load(one.name, path) for one, path in zip(named, paths, strict=True)]
        give_back_freed()
        return LoadedTexts(read, floor_bytes)

    return Texts([one.name for one in named], load)


def _announce(url: str) -> None:
    click.echo(f"kvell: serving {url}/v1 (Ctrl-C ends it)", err=True)


def _announce_json(url: str) -> None:
    click.echo(json.dumps({"url": url, "pid": os.getpid()}))
    sys.stdout.flush()


INHERITED = ("--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}")
"""Arguments that the front fills in at each start of an instance."""


def instance_command(settings: EngineSettings, *, debug: bool = False) -> list[str]:
    """Return an instance's command line; the front fills in what is in braces."""
    command = [sys.executable, "-m", "kvell.cli.main", "instance", *settings.flags()]
    return [*command, *(["--debug"] if debug else []), *INHERITED]
