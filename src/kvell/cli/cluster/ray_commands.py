"""``kvell cluster up`` and ``down``: Ray on this machine, for servers on several."""

import json

import click

from kvell.cli.terminal.environment import has_ray_token, ray_environment
from kvell.cli.terminal.options import json_option
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, debug_option
from kvell.cli.terminal.signals import interruptible
from kvell.errors import ChangeSomething


@click.command()
@click.option("--join", "joins", metavar="HOST:PORT", default="", help="Join this cluster.")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="",
    help="This machine's address for other machines. [default: as Ray finds it]",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=6379,
    show_default=True,
    help="Port of a new cluster.",
)
@click.option(
    "--client-port",
    type=click.IntRange(1024, 65535),
    default=10001,
    show_default=True,
    help="Port of a new cluster for ray:// addresses.",
)
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processors that it offers; each instance takes one. [default: all]",
)
@json_option
@debug_option
@click.pass_obj
def up(
    session: Session,
    /,
    joins: str,
    host: str,
    port: int,
    client_port: int,
    cpus: int | None,
    as_json: bool,
) -> None:
    """Start Ray on this machine: a new cluster, or one more machine of it.

    It runs until kvell cluster down.
    """
    from kvell.fleet.placing.node_record import read_record, record_of
    from kvell.fleet.placing.opening import check_ray
    from kvell.fleet.placing.ray.node import RayNode
    from kvell.fleet.placing.ray.node_settings import NodeSettings

    check_ray(joins or "up")
    if (running := read_record(session.cache_dir)) is not None:
        problem = f"runs on this machine already (pid {running.pid})"
        raise ChangeSomething("cluster", running.address, problem, "use it, or: kvell cluster down")
    settings = NodeSettings(joins, host, port, cpus, client_port)
    node = RayNode(settings, ray_environment(), outlives=True)
    with interruptible():
        with progress_bar("starting Ray"):
            node.start()
        try:
            record = record_of(node.pid, node.address, node.folder)
            record.save(session.cache_dir)
        except BaseException:  # without its record, kvell cluster down would not find it
            node.end()
            raise
    if not has_ray_token():
        remedy = "keep its ports from others, or set RAY_AUTH_MODE=token before"
        click.echo(f"kvell: any client that reaches Ray can run programs here; {remedy}", err=True)
    if as_json:
        click.echo(json.dumps({"address": record.address, "pid": record.pid}))
        return
    click.echo(f"Ray runs at {record.address} (pid {record.pid})")
    click.echo(f"  other machines:  kvell cluster up --join {record.address}")
    click.echo(f"  to serve:        kvell serve --cluster {record.address}")


@click.command()
@debug_option
@click.pass_obj
def down(session: Session, /) -> None:
    """End the Ray that kvell cluster up started on this machine.

    Instances that run here end too; their server starts them elsewhere.
    """
    from kvell.fleet.placing.node_record import read_record
    from kvell.fleet.placing.ray.node import END_SECONDS

    running = read_record(session.cache_dir)
    if running is None:
        click.echo("no Ray of kvell cluster up runs on this machine", err=True)
        return
    with progress_bar("ending Ray"):
        running.end(session.cache_dir, END_SECONDS)


def print_machines(cluster: str, as_json: bool) -> None:
    """Print the machines of a Ray cluster to stdout.

    :raises ChangeSomething: when Ray is not installed or does not answer.
    """
    from kvell.cli.cluster.ray_address import check_cluster
    from kvell.cli.cluster.table import print_rows

    check_cluster(cluster)
    from kvell.fleet.placing.ray.connection import connect, disconnect
    from kvell.fleet.placing.ray.machines import machines

    connect(cluster)
    try:
        nodes = machines()
    finally:
        disconnect()
    if as_json:
        shown = [
            {"address": node.address, "alive": node.is_alive, "cpus": node.processors}
            for node in nodes
        ]
        click.echo(json.dumps({"machines": shown}))
        return
    rows = [
        (node.address, "alive" if node.is_alive else "dead", f"{node.processors:g}")
        for node in nodes
    ]
    print_rows(f"machines of {cluster}", ("machine", "state", "processors"), rows)
