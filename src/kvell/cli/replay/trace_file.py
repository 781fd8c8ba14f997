"""``--trace``: the rows of a file in any supported format, or of a generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvell.cli.plan.configs import config_path
from kvell.cli.terminal.progress import notice, progress_bar
from kvell.cli.terminal.session import Session
from kvell.errors import ChangeSomething
from kvell.flags import setting

if TYPE_CHECKING:
    from kvell.models.text.tokenizer import Tokenizer
    from kvell.simulator.traces.rows import TraceRow

LEAST_RATE = 1e-6
"""The lowest rate; sums of arrival times overflow at smaller rates."""


@dataclass(frozen=True)
class TraceFlags:
    """The flags that choose the requests of a replay."""

    trace: str = setting(
        "",
        "--trace",
        "A trace file, or the name of a generator like chat.",
        typed=None,
        required=True,
    )
    limit: int | None = setting(
        None, "--limit", "Maximum number of requests of the trace.", "integer", metavar=""
    )
    block_tokens: int | None = setting(
        None,
        "--block-tokens",
        "Tokens of a block of hash_ids.  [default: as the trace's format or the trace says]",
        "integer",
        metavar="N",
    )
    repeat: int = setting(
        1, "--repeat", "Replay the trace N times.", "integer", metavar="", typed=None
    )
    seed: int = setting(
        0, "--seed", "Seed of a generator.", "integer", metavar="", least=0, typed=None
    )
    rate: float | None = setting(
        None,
        "--rate",
        "Requests per second, as Poisson arrivals.",
        "number",
        metavar="R",
        least=LEAST_RATE,
    )
    wrong_hints: float | None = setting(
        None,
        "--hints",
        "Clients hint whether they return; the fraction of wrong hints, from 0 to 1.",
        "number",
        metavar="WRONG",
        least=0,
        most=1,
    )

    def requests(self, count_tokens: Callable[[str], int]) -> "Sequence[TraceRow]":
        """Return the requests of a trace file, or of the generator with that name.

        :raises ChangeSomething: if ``block_tokens`` is given with a generator.
        """
        from kvell.load.arrivals import retime
        from kvell.simulator.traces.generators import generate_trace
        from kvell.simulator.traces.hints import add_hints
        from kvell.simulator.traces.rows import repeat
        from kvell.simulator.traces.trace import read_trace

        path = Path(self.trace).expanduser()
        block = self.block_tokens
        if path.is_file():
            rows = read_trace(path, self.limit, count_tokens, notice, block_tokens=block)
        elif block is not None:
            problem = f"is of files, and {self.trace} is the name of a generator, or no file"
            raise ChangeSomething("--block-tokens", block, problem, "leave the flag out")
        else:
            rows = generate_trace(self.trace, self.limit, self.seed)
        rows = repeat(rows, self.repeat)
        if self.rate is not None:
            rows = retime(rows, rate=self.rate, seed=self.seed)
        return rows if self.wrong_hints is None else add_hints(rows, self.wrong_hints)


def token_counter(model: str, session: Session) -> Callable[[str], int]:
    """Return a counter of tokens: the model's tokenizer, or an estimate if there is none.

    The tokenizer is loaded at the first text.
    """
    from kvell.simulator.traces.formats.json_array import BYTES_PER_TOKEN, approximate_tokens

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
