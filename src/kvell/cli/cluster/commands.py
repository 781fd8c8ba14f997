"""``kvell cluster``: commands that show and change the instances of a running server."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.cluster.ray_commands import down, print_machines, up
from kvell.cli.terminal.options import json_option
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, api_key_option, debug_option
from kvell.cluster.instances import parse_instances

if TYPE_CHECKING:
    from kvell.cli.cluster.client import ClusterClient
    from kvell.cli.cluster.state import ClusterAnswer
    from kvell.cli.cluster.waiting import Goal

Command = Callable[..., Any]


@dataclass(frozen=True)
class Server:
    """The server of a command, and the format of its answer."""

    client: "ClusterClient"
    as_json: bool

    def show(self, answer: "ClusterAnswer") -> None:
        """Print the answer as JSON or as a table."""
        if self.as_json:
            click.echo(json.dumps(answer.raw))
            return
        from kvell.cli.cluster.table import print_cluster

        print_cluster(answer.cluster)


def server_options(command: Command) -> Command:
    """Add the flags of all commands that talk to a server; the command gets a ``server``."""

    @functools.wraps(command)
    def gathered(*args: Any, url: str, api_key: str | None, as_json: bool, **given: Any) -> Any:
        from kvell.cli.cluster.client import ClusterClient

        return command(*args, server=Server(ClusterClient(url, api_key), as_json), **given)

    url = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="The server."
    )
    api_key = api_key_option("Sent as a bearer token.")
    return url(api_key(json_option(debug_option(gathered))))


def wait_options(command: Command) -> Command:
    """Add the flags for waiting until a change is complete."""
    wait = click.option(
        "--wait/--no-wait", default=True, show_default=True, help="Wait until it is done."
    )
    timeout = click.option(
        "--timeout",
        "timeout_seconds",
        type=click.FloatRange(min=0),
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help="Maximum wait; the server continues.",
    )
    return wait(timeout(command))


@click.group(short_help="Operate a running server: its engines and their number.")
def cluster() -> None:
    """Show the instances of a running server, add some, or take some out of service.

    \b
    kvell cluster status
    kvell cluster scale mixed=4
    kvell cluster drain mixed-1

    On several machines, start and end Ray on each of them.

    \b
    kvell cluster up
    kvell cluster up --join 10.0.0.1:6379
    kvell cluster down
    """


cluster.add_command(up)
cluster.add_command(down)


@cluster.command()
@click.option(
    "--cluster",
    "ray_address",
    metavar="ADDRESS",
    help="Show the machines of this Ray cluster instead, as kvell serve --cluster has it.",
)
@server_options
def status(server: Server, ray_address: str | None) -> None:
    """Show all instances: their states, their machines, their load and their memory."""
    if ray_address is None:
        server.show(server.client.status())
    else:
        print_machines(ray_address, server.as_json)


@cluster.command()
@click.argument("instances", metavar="ROLE=N")
@wait_options
@server_options
@click.pass_obj
def scale(
    session: Session, /, server: Server, instances: str, wait: bool, timeout_seconds: float
) -> None:
    """Start or drain instances until there are N, as in mixed=4.

    The youngest are drained first. Requests that they have go on to their end.
    """
    from kvell.cli.cluster.waiting import ScaleGoal

    counts = parse_instances(instances, "instances")
    answer = server.client.scale(counts)
    if wait:
        answer = _waited(session, server, ScaleGoal(counts), answer, timeout_seconds)
    server.show(answer)


@cluster.command()
@click.argument("instance_id", metavar="ID")
@wait_options
@server_options
@click.pass_obj
def drain(
    session: Session, /, server: Server, instance_id: str, wait: bool, timeout_seconds: float
) -> None:
    """Take one instance out of service, as in mixed-1.

    It gets no further requests, and ends when it has finished those that it has.
    """
    from kvell.cli.cluster.waiting import RemovalGoal

    answer = server.client.drain(instance_id)
    if wait:
        answer = _waited(session, server, RemovalGoal(instance_id), answer, timeout_seconds)
    server.show(answer)


def _waited(
    session: Session, server: Server, goal: "Goal", answer: "ClusterAnswer", timeout_seconds: float
) -> "ClusterAnswer":
    from kvell.cli.cluster.waiting import wait_until

    with progress_bar("waiting") as progress:
        return wait_until(
            goal,
            answer,
            server.client.status,
            session.clock,
            timeout_seconds,
            lambda what: progress(what, 0.0),
        )
