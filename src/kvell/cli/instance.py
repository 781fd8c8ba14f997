"""``kvell instance``: one engine process, started by a front rather than by people."""

import gc
import socket
from pathlib import Path
from typing import get_args

import click

from kvell.cli.terminal.environment import take_processors
from kvell.cli.terminal.options import engine_options, with_kv_memory
from kvell.cli.terminal.progress import StageLines
from kvell.cli.terminal.session import Session
from kvell.cluster.instances import ROLES
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.mempool.place import DEFAULT_PD_CACHING, PageTransport, PdCaching, PoolPlace, PoolRole


@click.command(hidden=True)
@click.option("--socket-fd", type=int, required=True, help="A connected stream socket.")
@click.option("--incarnation", type=int, default=0, help="How often it was started before.")
@click.option("--processors", default="", help="Those it may use, like 0,1; all if not given.")
@click.option("--threads", type=int, default=0, help="Threads of its steps; 0: one a processor.")
@click.option("--weights-fd", type=int, default=-1, help="A memory file of shared weights.")
@click.option("--instance-id", default="", help="Its name among the others.")
@click.option("--role", type=click.Choice(ROLES), default="mixed", help="What it does.")
@click.option("--pool-dir", default="", help="Where it meets others; nowhere if not given.")
@click.option("--pd-caching", type=int, default=DEFAULT_PD_CACHING, help="Who caches what.")
@click.option(
    "--page-transport",
    type=click.Choice(get_args(PageTransport)),
    default="memory",
    help="How it reads others' pages, and they its.",
)
@click.option("--memory-parts", type=int, default=1, help="Instances that start at once.")
@engine_options
@click.pass_obj
def instance(
    session: Session,
    /,
    settings: EngineSettings,
    socket_fd: int,
    incarnation: int,
    processors: str,
    threads: int,
    weights_fd: int,
    instance_id: str,
    role: PoolRole,
    pool_dir: str,
    pd_caching: PdCaching,
    page_transport: PageTransport,
) -> None:
    """Serve the instance protocol over an inherited socket until the peer closes it."""
    if processors:  # before torch is imported
        take_processors([int(one) for one in processors.split(",")], threads)
    from kvell.engine.protocol.instance import serve_instance

    with socket.socket(fileno=socket_fd) as peer:
        chosen = with_kv_memory(settings, session)
        shared = None if weights_fd < 0 else weights_fd
        place = None
        if pool_dir:
            place = PoolPlace(instance_id, Path(pool_dir), role, pd_caching, page_transport)
        model = session.open_model(
            chosen, session.cache_dir, StageLines(), incarnation, shared, place
        )
        model.engine.warm()
        gc.freeze()  # objects of the start live on: scanning them would take 0.1 s each time
        try:
            serve_instance(model.engine, peer)
        finally:
            model.engine.close()
            gc.unfreeze()  # so that what refers to itself is freed before the process ends
