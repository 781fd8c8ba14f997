"""Progress on stderr, so that stdout has results only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kvell.models.sources.progress import Progress


@contextmanager
def progress_bar(first: str) -> Iterator[Progress]:
    """Show a bar while the block runs; without a terminal, print a line per stage.

    :param first: text shown until the block reports progress.
    """
    if sys.stderr.isatty():
        with _drawn_bar(first) as report:
            yield report
    else:
        yield StageLines()


def notice(sentence: str) -> None:
    click.echo(f"kvell: {sentence}", err=True)


class StageLines:
    """A progress report for logs: a line for each new stage."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, what: str, fraction: float) -> None:
        if what != self._stage:
            self._stage = what
            click.echo(f"kvell: {what} …", err=True)


@contextmanager
def _drawn_bar(first: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, fraction: bar.update(
            task, description=what, completed=fraction, total=1.0
        )
