"""``kvell serve``: the OpenAI API over HTTP."""

import sys

import click

from kvell.cli.options import engine_options
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
@engine_options
@click.pass_obj
def serve(
    session: Session, /, settings: EngineSettings, host: str, port: int, api_key: str | None
) -> None:
    """Serve the OpenAI API over HTTP."""
    from kvell.server.run import serve as serve_http

    serve_http(
        settings.model,
        instance_command(settings, debug=session.debug.on),
        cache_dir=session.cache_dir,
        host=host,
        port=port,
        api_key=api_key,
    )


def instance_command(settings: EngineSettings, *, debug: bool = False) -> list[str]:
    """The command line of an instance process; the front fills in ``{socket_fd}``."""
    command = [sys.executable, "-m", "kvell.cli.main", "instance", *settings.flags()]
    return [*command, *(["--debug"] if debug else []), "--socket-fd", "{socket_fd}"]
