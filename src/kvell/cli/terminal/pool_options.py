"""Options for several instances, of ``kvell serve`` and ``kvell replay``."""

from collections.abc import Callable
from typing import Any

import click

from kvell.cluster.routing.policies import DEFAULT_ROUTING, ROUTINGS
from kvell.mempool.rendezvous import PD_CACHING_NAMES, PD_CACHINGS, PdCaching

Command = Callable[..., Any]


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
        type=PdCachingType(),
        metavar="[" + "|".join(PD_CACHING_NAMES) + "]",
        help="Instances that keep prefixes: none, those of prefill, both kinds, or both with"
        " answers copied to prefill instances.  [default: answers]",
    )(command)


class PdCachingType(click.ParamType[PdCaching]):
    """One of ``PD_CACHING_NAMES``, or its number."""

    name = "pd-caching"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> PdCaching:
        """Return the number of the name."""
        for caching, name in zip(PD_CACHINGS, PD_CACHING_NAMES, strict=True):
            if str(value) in (name, str(caching)):
                return caching
        return self.fail(f"{value!r} is not one of {', '.join(PD_CACHING_NAMES)}.", param, ctx)


def adaptive_roles_option(command: Command) -> Command:
    """Add ``--adaptive-roles``."""
    return click.option(
        "--adaptive-roles",
        is_flag=True,
        help="Let prefill and decode instances change their roles by load.",
    )(command)
