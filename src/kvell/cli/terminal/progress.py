"""Progress on stderr, so that stdout has results only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import click

from kvell.models.sources.progress import Progress

STILL_SECONDS = 4


@contextmanager
def progress_bar(first: str) -> Iterator[Progress]:
    """Show a bar while the block runs; without a terminal, print a line per stage.

    :param first: text shown until the block reports progress.
    """
    if sys.stderr.isatty():
        with _drawn_bar(first) as report:
            yield report
    else:
        with stage_lines(first) as report:
            yield report


def notice(sentence: str) -> None:
    click.echo(f"kvell: {sentence}", err=True)


@contextmanager
def stage_lines(first: str) -> Iterator[Progress]:
    """Print a line for each stage while the block runs, and one every 4 s.

    :param first: text of those lines until the block reports progress.
    """
    lines = StageLines(first)
    ended = Event()
    thread = Thread(target=repeat, args=(lines, lambda: ended.wait(STILL_SECONDS)), daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()


def repeat(lines: "StageLines", wait: Callable[[], bool]) -> None:
    """Print the stage each time that a wait returns False, with the seconds of all waits."""
    seconds = 0
    while not wait():
        seconds += STILL_SECONDS
        notice(f"{lines.stage} … {seconds} s")


class StageLines:
    """A progress report for logs: a line for each new stage."""

    def __init__(self, first: str) -> None:
        self.stage = first
        self._printed = ""

    def __call__(self, what: str, fraction: float) -> None:
        self.stage = what
        if what != self._printed:
            self._printed = what
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
