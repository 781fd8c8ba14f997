"""Options for several instances, of ``kvell serve`` and ``kvell replay``."""

from collections.abc import Callable
from typing import Any

import click

from kvell.cluster.routing.policies import DEFAULT_ROUTING, ROUTINGS
from kvell.mempool.rendezvous import PD_CACHINGS, PdCaching

Command = Callable[..., Any]


def routing_option(command: Command) -> Command:
    """Add ``--routing``."""
    return click.option(
        "--routing",
        type=click.Choice(ROUTINGS),
        default=DEFAULT_ROUTING,
        show_default=True,
        help="Which instance gets a request.",
    )(command)


def pd_caching_option(command: Command) -> Command:
    """Add ``--pd-caching``, a number or None."""
    return click.option(
        "--pd-caching",
        type=click.Choice([str(number) for number in PD_CACHINGS]),
        callback=_number,
        help="Caches: 0 none, 1 of prefill instances, 2 of decode instances too, 3 prefill"
        " instances also get the answers.  [default: 3]",
    )(command)


def adaptive_roles_option(command: Command) -> Command:
    """Add ``--adaptive-roles``."""
    return click.option(
        "--adaptive-roles",
        is_flag=True,
        help="Let prefill and decode instances change their roles by load.",
    )(command)


def _number(_context: click.Context, _option: click.Parameter, value: str | None) -> Any:
    caching: PdCaching | None = None if value is None else PD_CACHINGS[int(value)]
    return caching
