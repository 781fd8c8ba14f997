"""``kvell instance``: one engine process, started by a front rather than by people."""

import gc
import socket

import click

from kvell.cli.terminal.options import engine_options, with_kv_memory
from kvell.cli.terminal.progress import StageLines
from kvell.cli.terminal.session import EngineSettings, Session


@click.command(hidden=True)
@click.option("--socket-fd", type=int, required=True, help="A connected stream socket.")
@click.option("--incarnation", type=int, default=0, help="How often it was started before.")
@engine_options
@click.pass_obj
def instance(session: Session, settings: EngineSettings, socket_fd: int, incarnation: int) -> None:
    """Serve the instance protocol over an inherited socket until the peer closes it."""
    from kvell.engine.protocol.instance import serve_instance

    with socket.socket(fileno=socket_fd) as peer:
        chosen = with_kv_memory(settings, session)
        model = session.open_model(chosen, session.cache_dir, StageLines(), incarnation)
        model.engine.warm()
        gc.freeze()  # objects of the start live on: scanning them would take 0.1 s each time
        serve_instance(model.engine, peer)
