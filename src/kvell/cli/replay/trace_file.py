"""``--trace``: rows of a file in any format that is known, or of a generator."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvell.cli.plan.command import config_path
from kvell.cli.replay.models import named_config
from kvell.cli.terminal.progress import notice, progress_bar
from kvell.cli.terminal.session import Session

if TYPE_CHECKING:
    from kvell.models.text.tokenizer import Tokenizer
    from kvell.simulator.traces.rows import TraceRow


def load_rows(
    trace: str, limit: int | None, seed: int, count_tokens: Callable[[str], int]
) -> "Sequence[TraceRow]":
    """Return the rows of a trace file, or of the generator with that name.

    :param count_tokens: counts the tokens of texts, where the file has texts.
    """
    from kvell.simulator.traces.generators import generate_trace
    from kvell.simulator.traces.trace import read_trace

    path = Path(trace).expanduser()
    if path.is_file():
        return read_trace(path, limit, count_tokens, notice)
    return generate_trace(trace, limit, seed)


def token_counter(model: str, session: Session) -> Callable[[str], int]:
    """Return what counts tokens: the model's tokenizer, or about, if its directory has none.

    Nothing is read before the first text.
    """
    from kvell.simulator.traces.formats.sharegpt import BYTES_PER_TOKEN, approximate_tokens

    @cache
    def tokenizer() -> "Tokenizer | None":
        with progress_bar("reading the tokenizer") as report:
            path = config_path(named_config(model), session, report)
            # Imported here: it takes seconds, and most traces have no texts.
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
