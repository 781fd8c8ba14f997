"""``kvell meet``: the lookup of a cluster's manager for a front, which runs this command."""

import os
import sys

import click


@click.command(hidden=True)
def meet() -> None:
    """Find the manager that stdin names, and print its address."""
    from kvell.fleet.placing.meeting import answer
    from kvell.fleet.placing.ray.starting import find_manager

    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray's output must not mix in
        output.write(answer(sys.stdin.buffer.read(), find_manager))
