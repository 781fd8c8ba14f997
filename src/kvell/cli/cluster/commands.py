"""``kvell cluster``: commands that show and change the instances of a running server."""

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvell.cli.cluster.client import Cluster, ClusterAnswer, ClusterClient, Instance
from kvell.cli.cluster.ray_commands import down, print_machines, up
from kvell.cli.terminal.options import json_option
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, api_key_option, debug_option
from kvell.clock import Clock
from kvell.cluster.instances import parse_instances
from kvell.errors import KvellError, TryLater

Command = Callable[..., Any]


@dataclass(frozen=True)
class Server:
    """The server of a command, and the format of its answer."""

    client: ClusterClient
    as_json: bool

    def show(self, answer: ClusterAnswer) -> None:
        if self.as_json:
            click.echo(json.dumps(answer.raw))
            return
        from kvell.cli.cluster.table import print_cluster

        print_cluster(answer.cluster)


def server_options(command: Command) -> Command:
    """Add the flags of all commands that talk to a server; the command gets a ``server``."""

    @functools.wraps(command)
    def gathered(*args: Any, url: str, api_key: str | None, as_json: bool, **given: Any) -> Any:
        return command(*args, server=Server(ClusterClient(url, api_key), as_json), **given)

    url = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="The server."
    )
    api_key = api_key_option("Sent as a bearer token.")
    return url(api_key(json_option(debug_option(gathered))))


def wait_options(command: Command) -> Command:
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

    answer = server.client.drain(instance_id)
    if wait:
        answer = _waited(session, server, RemovalGoal(instance_id), answer, timeout_seconds)
    server.show(answer)


def _waited(
    session: Session, server: Server, goal: "Goal", answer: ClusterAnswer, timeout_seconds: float
) -> ClusterAnswer:

    with progress_bar("waiting") as progress:
        return wait_until(
            goal,
            answer,
            server.client.status,
            session.clock,
            timeout_seconds,
            lambda what: progress(what, 0.0),
        )


POLL_SECONDS = 0.5
SERVING, FAILED = "serving", "failed"


@dataclass(frozen=True)
class ScaleGoal:
    """The goal that each role has the given number of serving instances and no others."""

    counts: Mapping[str, int]

    def lacking(self, cluster: Cluster) -> str:
        """Return the number of serving instances, and the states of the others; "" at the goal."""
        parts = []
        for role, wanted in self.counts.items():
            those = _of_role(cluster, role)
            others = [f"{each.id} is {each.state}" for each in those if each.state != SERVING]
            serving = len(those) - len(others)
            if others or serving != wanted:
                count = f"{serving} of {wanted} {role} instances serve"
                parts.append(", ".join((count, *others)))
        return ", ".join(parts)

    def hopeless(self, cluster: Cluster) -> str:
        """Return why the goal cannot be reached; "" while it can."""
        those = (instance for role in self.counts for instance in _of_role(cluster, role))
        failed = [instance.id for instance in those if instance.state == FAILED]
        return f"{', '.join(failed)} failed; the server's output says why" if failed else ""


@dataclass(frozen=True)
class RemovalGoal:
    """The goal that no instance has this id."""

    instance_id: str

    def lacking(self, cluster: Cluster) -> str:
        states = (member.state for member in cluster.instances if member.id == self.instance_id)
        state = next(states, None)
        return f"{self.instance_id} is {state}" if state else ""

    def hopeless(self, cluster: Cluster) -> str:
        return ""


Goal = ScaleGoal | RemovalGoal


def wait_until(
    goal: Goal,
    answer: ClusterAnswer,
    ask: Callable[[], ClusterAnswer],
    clock: Clock,
    timeout_seconds: float,
    report: Callable[[str], None],
) -> ClusterAnswer:
    """Poll the state until the goal is reached; return the last answer.

    :param answer: answer to the request for the change.  It may still list an instance that had
        failed before, so it is not checked for failures.
    :raises TryLater: when the time is over.
    :raises KvellError: when the goal cannot be reached.
    """
    start_seconds = clock.now_seconds()
    while what := goal.lacking(answer.cluster):
        left_seconds = start_seconds + timeout_seconds - clock.now_seconds()
        if left_seconds <= 0:
            raise TryLater(f"not done within {timeout_seconds:g} s; the server continues: {what}")
        report(what)
        time.sleep(min(POLL_SECONDS, left_seconds))
        answer = ask()
        if why := goal.hopeless(answer.cluster):
            raise KvellError(why)
    return answer


def _of_role(cluster: Cluster, role: str) -> list[Instance]:
    return [instance for instance in cluster.instances if instance.role == role]
