"""``--trace``: the rows of a file in any supported format, or of a generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvell.cli.plan.configs import config_path
from kvell.cli.terminal.options import Command, gathering
from kvell.cli.terminal.progress import notice, progress_bar
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.sizes import FiniteRange

if TYPE_CHECKING:
    from kvell.models.text.tokenizer import Tokenizer
    from kvell.simulator.traces.rows import TraceRow

AT_LEAST_ONE = click.IntRange(min=1)
RATE = FiniteRange(min=1e-6)
"""The type of a rate; sums of arrival times overflow at smaller rates."""


@dataclass(frozen=True)
class TraceFlags:
    """The flags that choose the requests of a replay.

    :param trace: file, or name of a generator.
    :param rate: requests per second, which replace the trace's times.
    :param wrong_hints: share of the clients' hints that are wrong; None: the trace's own hints.
    """

    trace: str
    limit: int | None
    repeat: int
    seed: int
    rate: float | None
    wrong_hints: float | None

    def requests(self, count_tokens: Callable[[str], int]) -> "Sequence[TraceRow]":
        """Return the requests.

        :param count_tokens: returns the tokens of a text, for files with texts.
        """
        from kvell.load.arrivals import retime
        from kvell.simulator.traces.hints import add_hints
        from kvell.simulator.traces.rows import repeat

        rows = repeat(load_rows(self.trace, self.limit, self.seed, count_tokens), self.repeat)
        if self.rate is not None:
            rows = retime(rows, rate=self.rate, seed=self.seed)
        return rows if self.wrong_hints is None else add_hints(rows, self.wrong_hints)


def trace_options(command: Command) -> Command:
    """Add the flags; the command gets them as ``source``."""

    options = (
        click.option(
            "--trace", required=True, help="A trace file, or the name of a generator like chat."
        ),
        click.option("--limit", type=AT_LEAST_ONE, help="Maximum number of requests of the trace."),
        click.option("--repeat", type=AT_LEAST_ONE, default=1, help="Replay the trace N times."),
        click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of a generator."),
        click.option(
            "--rate", type=RATE, metavar="R", help="Requests per second, as Poisson arrivals."
        ),
        click.option(
            "--hints",
            "wrong_hints",
            type=FiniteRange(0, 1),
            metavar="WRONG",
            help="Clients hint whether they return; the fraction of wrong hints, from 0 to 1.",
        ),
    )
    return gathering(command, "source", TraceFlags, options)


def load_rows(
    trace: str, limit: int | None, seed: int, count_tokens: Callable[[str], int]
) -> "Sequence[TraceRow]":
    """Return the rows of a trace file, or of the generator with that name.

    :param count_tokens: returns the tokens of a text, for files with texts.
    """
    from kvell.simulator.traces.generators import generate_trace
    from kvell.simulator.traces.trace import read_trace

    path = Path(trace).expanduser()
    if path.is_file():
        return read_trace(path, limit, count_tokens, notice)
    return generate_trace(trace, limit, seed)


def token_counter(model: str, session: Session) -> Callable[[str], int]:
    """Return a counter of tokens: the model's tokenizer, or an estimate if there is none.

    The tokenizer is loaded at the first text.
    """
    from kvell.simulator.traces.formats.sharegpt import BYTES_PER_TOKEN, approximate_tokens

    @cache
    def tokenizer() -> "Tokenizer | None":
        with progress_bar("reading the tokenizer") as report:
            path = config_path(model, session, report)
            # Imported here: the import takes seconds, and most traces have no texts.
            from kvell.models.text.tokenizer import Tokenizer, holds_tokenizer

            directory = path if path.is_dir() else path.parent
            if holds_tokenizer(directory):
                return Tokenizer.load(directory)
        notice(f"{model} has no tokenizer here: {BYTES_PER_TOKEN} bytes of text count as a token")
        return None

    def count(text: str) -> int:
        loaded = tokenizer()
        if loaded is None:
            return approximate_tokens(text)
        return len(loaded.encode(text, add_special_tokens=False))

    return count
