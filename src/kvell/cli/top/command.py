"""``kvell top``: a periodically refreshed view of a running server."""

import time
from collections.abc import Callable, Iterator

import click

from kvell.cli.terminal.options import json_option
from kvell.cli.terminal.session import api_key_option, debug_option


@click.command(short_help="Watch a running server: memory, requests, rates.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@api_key_option("An operator's key, sent as a bearer token.")
@click.option(
    "--every",
    "every_seconds",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Print once and exit.")
@json_option
@debug_option
def top(url: str, api_key: str | None, every_seconds: float, once: bool, as_json: bool) -> None:
    """Show a server's memory and requests until Ctrl-C; with --json a line for each look."""
    from rich.live import Live

    from kvell.cli.cluster.client import ClusterClient
    from kvell.cli.terminal.figures import wide_console
    from kvell.cli.top.screen import ServerSnapshot, read, screen

    looks = _looks(ClusterClient(url, api_key).pages, every_seconds, once=once)
    if as_json:
        for body in looks:
            click.echo(body.decode())
        return
    if once:
        wide_console().print(screen(read(next(looks))))
        return
    before: ServerSnapshot | None = None
    with Live(console=wide_console(), auto_refresh=False, screen=True) as live:
        for body in looks:
            seen = read(body)
            live.update(screen(seen, before), refresh=True)
            before = seen


def _looks(look: Callable[[], bytes], every_seconds: float, *, once: bool) -> Iterator[bytes]:
    yield look()
    while not once:
        time.sleep(every_seconds)
        yield look()
