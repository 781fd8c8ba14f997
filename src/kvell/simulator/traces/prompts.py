"""Token ids for a trace's requests: equal chains of blocks give equal tokens, all others differ.

::

    id   … -1    images: -1 - id of the content, for each of an image's tokens
         0       FILLER
         1 …     ranges of block_tokens ids, one for each block id of the trace
         base …  two marks for each request: start of its own prompt tokens, its output

Tokens without block ids begin with their request's own mark and continue with FILLER.
One mark is enough: matching walks from the first token and stops at the first one that
differs, so no other request ever hits what follows a mark (or shares a page with it).
So ids never run out or wrap: a request costs two, however long it is.

A turn that continues a session is rebuilt from the marks of all turns before it, so no
turn's tokens need be kept.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.simulator.traces.rows import (
    PlacedPrompt,
    TraceRow,
    continuation_problem,
    place,
    predecessors,
)

FILLER = 0
MARKS_PER_REQUEST = 2
ID_LIMIT = 1 << 31
"""Token ids are int32."""

Tokens = npt.NDArray[np.int32]


class PromptMaker:
    """Maker of the tokens of a request, the same at each call.

    :param images_in_text: see :func:`kvell.simulator.traces.rows.place`.
    :raises ChangeSomething: if int32 has too few ids, or a row cannot continue its session.
    """

    def __init__(self, rows: Sequence[TraceRow], images_in_text: bool = True) -> None:
        self._before = predecessors(rows)
        self._images_in_text = images_in_text
        for index, row in enumerate(rows):
            before = self._before[index]
            if problem := continuation_problem(row, None if before is None else rows[before]):
                raise ChangeSomething("--trace", f"row {index}", f"continues {problem}", "mend it")
        self._rows = rows
        self._block_tokens = max((row.block_tokens for row in rows), default=0)
        ids = {id(row.block_ids): row.block_ids for row in rows}
        self._known = np.unique(np.concatenate(list(ids.values()))) if ids else np.empty(0)
        self._base = 1 + len(self._known) * self._block_tokens
        if self._base + MARKS_PER_REQUEST * len(rows) > ID_LIMIT:
            raise ChangeSomething(
                "--trace", f"{len(rows)} requests", "has more tokens than int32", "use --limit"
            )

    def place(self, index: int) -> PlacedPrompt:
        return place(self._rows[index], self._images_in_text)

    def prompt(self, index: int) -> Tokens:
        row = self._rows[index]
        text = self._text(index)
        if not row.images:
            return text
        spans = self.place(index).images
        runs = [
            np.full(span[1], -1 - image.id, np.int32)
            for image, span in zip(row.images, spans, strict=True)
        ]
        pieces = np.split(text, [image.start for image in row.images])
        between = [part for pair in zip(pieces, runs, strict=False) for part in pair]
        return np.concatenate([*between, pieces[-1]])

    def output_token(self, index: int, position: int) -> int:
        return FILLER if position else self._base + MARKS_PER_REQUEST * index + 1

    def _text(self, index: int) -> Tokens:
        tokens = np.full(self._rows[index].prompt_tokens, FILLER, np.int32)
        turns = self._turns(index)
        own_start = self._write_named(tokens, self._rows[turns[0]])
        for turn in turns:
            row = self._rows[turn]
            if own_start < row.prompt_tokens:
                tokens[own_start] = self._base + MARKS_PER_REQUEST * turn
            if turn != index:
                tokens[row.prompt_tokens] = self.output_token(turn, 0)
            own_start = row.num_tokens
        return tokens

    def _turns(self, index: int) -> list[int]:
        turns = [index]
        while self._rows[turns[-1]].continues and (before := self._before[turns[-1]]) is not None:
            turns.append(before)
        return turns[::-1]

    def _write_named(self, tokens: Tokens, row: TraceRow) -> int:
        """Write the blocks that have ids; return where they end."""
        named = min(len(row.block_ids) * row.block_tokens, row.prompt_tokens)
        if named:
            firsts = 1 + np.searchsorted(self._known, row.block_ids) * self._block_tokens
            inside = np.arange(row.block_tokens, dtype=np.int32)
            blocks: Tokens = (firsts.astype(np.int32)[:, None] + inside).reshape(-1)
            tokens[:named] = blocks[:named]
        return named
