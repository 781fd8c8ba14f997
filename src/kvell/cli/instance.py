"""``kvell instance``: one engine process, which a front starts."""

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from kvell.cli.terminal.environment import take_processors, take_threads
from kvell.cli.terminal.options import engine_options, record_options, with_kv_memory
from kvell.cli.terminal.progress import stage_lines
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.stderr import stderr_to
from kvell.cluster.instances import ROLES
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.fleet.instance.price_settings import PriceSettings
from kvell.mempool.rendezvous import (
    DEFAULT_PD_CACHING,
    FolderRendezvous,
    NetworkRendezvous,
    PageTransport,
    PdCaching,
    PoolRole,
    Rendezvous,
    remove_orphaned,
)
from kvell.models.sources.progress import Progress
from kvell.server.logs.background import in_background

if TYPE_CHECKING:
    from kvell.engine.engine import Engine as OpenEngine
    from kvell.engine.opened import Pricing
    from kvell.serving.gate import Engine


@click.command(hidden=True)
@click.option("--socket-fd", type=int, default=-1, help="A connected stream socket.")
@click.option("--incarnation", type=int, default=0, help="How often it was started before.")
@click.option(
    "--processors", default="", help="Processors that it may use, like 0,1. [default: all]"
)
@click.option(
    "--most-threads", type=int, default=0, help="Threads of its steps at most; 0: one a processor."
)
@click.option("--weights-fd", type=int, default=-1, help="A memory file of shared weights.")
@click.option("--instance-id", default="", help="Name of the instance.")
@click.option("--role", type=click.Choice(ROLES), default="mixed", help="Role of the instance.")
@click.option(
    "--pool-dir", default="", help="Directory of the memory pool's sockets. [default: no pool]"
)
@click.option("--pool-name", default="", help="Name of a memory pool over TCP, instead.")
@click.option(
    "--pool-host",
    default="",
    help="This machine's address for other machines.  Fronts connect there; the secret is read "
    "from stdin.",
)
@click.option("--pd-caching", type=int, default=DEFAULT_PD_CACHING, help="Which roles cache what.")
@click.option(
    "--page-transport",
    type=click.Choice(get_args(PageTransport)),
    default="memory",
    help="How pages move between instances.",
)
@click.option(
    "--memory-parts", type=int, default=1, help="Number of instances that start together."
)
@record_options(PriceSettings, "prices")
@engine_options
@click.pass_obj
def instance(
    session: Session,
    /,
    settings: EngineSettings,
    prices: PriceSettings,
    socket_fd: int,
    incarnation: int,
    processors: str,
    most_threads: int,
    weights_fd: int,
    instance_id: str,
    role: PoolRole,
    pool_dir: str,
    pool_name: str,
    pool_host: str,
    pd_caching: PdCaching,
    page_transport: PageTransport,
) -> None:
    """Serve the instance protocol over an inherited socket, or to all fronts that connect."""
    if processors:  # before torch is imported
        take_processors([int(number) for number in processors.split(",")], most_threads)
    elif most_threads:
        take_threads(most_threads)
    secret = b""
    with contextlib.ExitStack() as stack:
        # An instance that is started again must not wait until somebody reads its progress.
        stack.enter_context(stderr_to(stack.enter_context(in_background(sys.stderr))))
        if pool_dir:
            stack.callback(remove_orphaned, Path(pool_dir), os.getppid())
        serve: Callable[[Engine], None]
        if pool_host:
            from kvell.serving.fronts import FrontListener, read_secret
            from kvell.serving.loop import serve_fronts

            secret = read_secret(sys.stdin.fileno())
            door = stack.enter_context(FrontListener(pool_host, secret, instance_id, incarnation))
            door.ends_with(sys.stdin.fileno())
            click.echo(door.address)  # the launcher reads it
            serve = partial(serve_fronts, door=door)
        elif socket_fd < 0:
            remedy = "use kvell serve, which starts instances"
            raise ChangeSomething("--socket-fd", socket_fd, "is not a socket", remedy)
        else:
            from kvell.serving.lone import serve_instance

            peer = stack.enter_context(socket.socket(fileno=socket_fd))
            serve = partial(serve_instance, sock=peer)
        chosen = with_kv_memory(settings, session)
        shared = None if weights_fd < 0 else weights_fd
        place: Rendezvous | None = None
        if pool_name:
            place = NetworkRendezvous(instance_id, pool_name, pool_host, secret, role, pd_caching)
        elif pool_dir:
            place = FolderRendezvous(instance_id, Path(pool_dir), role, pd_caching, page_transport)
        with stage_lines("loading") as report:
            pricing = _pricing(prices, session, settings, place, report, has_others=weights_fd >= 0)
            model = session.open_model(
                chosen, session.cache_dir, report, incarnation, shared, place, pricing
            )
        _serve(model.engine, serve)


def _serve(engine: "OpenEngine", serve: "Callable[[Engine], None]") -> None:
    engine.warm()
    gc.freeze()  # objects of the start stay alive: each scan of them would take 0.1 s
    try:
        serve(engine)
    finally:
        engine.close()
        gc.unfreeze()  # so that reference cycles are freed before the process ends


def _pricing(
    prices: PriceSettings,
    session: Session,
    settings: EngineSettings,
    place: Rendezvous | None,
    report: Progress,
    *,
    has_others: bool,
) -> "Pricing | None":
    """Return what prices the instance; None for the default prices.

    Routers, roles and loans compare the prices of several instances, and a CPU buffer's rule of
    swaps needs them; nothing else does, and then the start does not wait for a calibration.

    :param has_others: whether other instances run on this host.
    """
    has_others |= settings.memory_parts > 1 or isinstance(place, NetworkRendezvous)
    is_used = has_others or settings.cpu_buffer_bytes is not None
    if prices.no_calibration or (prices.calibration is None and not is_used):
        return None
    from kvell.calibration.kept import KeptCalibrations
    from kvell.calibration.pricing import OwnPricing

    kept = KeptCalibrations(session.cache_dir, session.clock)
    transport = place.transport if isinstance(place, FolderRendezvous) else "tcp"
    return OwnPricing(kept, session.clock, report, prices.calibration, transport)
