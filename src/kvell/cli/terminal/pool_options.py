"""Options for several instances, of ``kvell serve`` and ``kvell replay``."""

from collections.abc import Callable
from typing import Any

import click

from kvell.cluster.routing.policies import DEFAULT_ROUTING, ROUTINGS
from kvell.mempool.rendezvous import PD_CACHING_NAMES, PD_CACHINGS, PdCaching

Command = Callable[..., Any]
_DIGITS = tuple(map(str, PD_CACHINGS))


def routing_option(command: Command) -> Command:
    """Add ``--routing``."""
    return click.option(
        "--routing",
        type=click.Choice(ROUTINGS),
        default=DEFAULT_ROUTING,
        show_default=True,
        metavar="POLICY",
        help=f"Instance that gets a request: {', '.join(ROUTINGS)}.",
    )(command)


def pd_caching_option(command: Command) -> Command:
    """Add ``--pd-caching``, a number or None."""
    return click.option(
        "--pd-caching",
        type=click.Choice([*PD_CACHING_NAMES, *_DIGITS]),
        callback=_number,
        metavar="[" + "|".join(PD_CACHING_NAMES) + "]",
        help="Instances that keep prefixes: none, those of prefill, both kinds, or both with"
        " answers copied to prefill instances.  [default: answers]",
    )(command)


def adaptive_roles_option(command: Command) -> Command:
    """Add ``--adaptive-roles``."""
    return click.option(
        "--adaptive-roles",
        is_flag=True,
        help="Let prefill and decode instances change their roles by load.",
    )(command)


def _number(_context: click.Context, _option: click.Parameter, value: str | None) -> Any:
    caching: PdCaching | None = None
    if value is not None:
        caching = PD_CACHINGS[(*PD_CACHING_NAMES, *_DIGITS).index(value) % len(PD_CACHINGS)]
    return caching
