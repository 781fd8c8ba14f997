"""Token ids for a trace's requests: equal chains of blocks give equal tokens, all else differs.

::

    id   0       FILLER
         1 …     ranges of block_tokens ids, one for each block id of the trace
         base …  two marks for each request: its prompt's end, its output

A stretch without ids begins with its request's own mark and goes on with FILLER.
Nothing else is needed to be unique: matching walks from the first token, and two
prompts part for good at the first one that differs, so what follows a mark (or shares
a page with it) is never found by anybody else.  So ids never run out or wrap: a
request costs two, however long it is.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.simulator.trace import TraceRow

FILLER = 0
MARKS_PER_REQUEST = 2
ID_LIMIT = 1 << 31
"""Token ids are int32."""

Tokens = npt.NDArray[np.int32]


class PromptMaker:
    """Makes the tokens of request ``index`` when they are asked for, and the same each time."""

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        self._rows = rows
        self._block_tokens = max((row.block_tokens for row in rows), default=0)
        ids = {id(row.block_ids): row.block_ids for row in rows}
        self._known = np.unique(np.concatenate(list(ids.values()))) if ids else np.empty(0)
        self._base = 1 + len(self._known) * self._block_tokens
        if self._base + MARKS_PER_REQUEST * len(rows) > ID_LIMIT:
            raise ChangeSomething(
                "--trace", f"{len(rows)} requests", "has more tokens than int32", "use --limit"
            )

    def prompt(self, index: int) -> Tokens:
        """int32 [prompt_tokens], a new array."""
        row = self._rows[index]
        tokens = np.full(row.prompt_tokens, FILLER, np.int32)
        named = min(len(row.block_ids) * row.block_tokens, row.prompt_tokens)
        if named:
            tokens[:named] = self._shared_runs(row)[:named]
        if named < row.prompt_tokens:
            tokens[named] = self._base + MARKS_PER_REQUEST * index
        return tokens

    def output_token(self, index: int, position: int) -> int:
        """Output token ``position`` of request ``index``."""
        return FILLER if position else self._base + MARKS_PER_REQUEST * index + 1

    def _shared_runs(self, row: TraceRow) -> Tokens:
        firsts = 1 + np.searchsorted(self._known, row.block_ids) * self._block_tokens
        inside = np.arange(row.block_tokens, dtype=np.int32)
        blocks: Tokens = (firsts.astype(np.int32)[:, None] + inside).reshape(-1)
        return blocks
