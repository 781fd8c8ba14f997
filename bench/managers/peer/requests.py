"""A trace's requests as token ids: equal beginnings where their block ids are equal."""

import gzip
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One request of a trace; its format: ``bench/replay/README.md``."""

    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    arrival_s: float = field(default=0.0, compare=False)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


def read_rows(path: Path, limit: int) -> list[Row]:
    """The first requests of a trace; sessions and images play no part here."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [_row(json.loads(line)) for line in itertools.islice(file, limit)]


def _row(raw: dict[str, Any]) -> Row:
    ids = tuple(raw.get("block_hashes") or ())
    size = raw.get("block_tokens", 0) if ids else 0
    return Row(raw["prompt_tokens"], raw["output_tokens"], ids, size, raw["arrival_s"])


class TokenMaker:
    """Token ids: a range for each block id, and ranges that nobody else has."""

    def __init__(self, rows: Sequence[Row]) -> None:
        size = max((row.block_tokens for row in rows), default=0)
        top = max((max(row.block_ids) for row in rows if row.block_ids), default=-1)
        self._fresh = (top + 1) * size

    def unique(self, count: int) -> range:
        """So many ids that were never given out."""
        start, self._fresh = self._fresh, self._fresh + count
        return range(start, self._fresh)

    def prompt(self, row: Row) -> list[int]:
        """A row's prompt; call it once for each row, in any order."""
        tokens: list[int] = []
        for block in row.block_ids:
            start = block * row.block_tokens
            tokens.extend(range(start, start + row.block_tokens))
        del tokens[row.prompt_tokens :]
        tokens.extend(self.unique(row.prompt_tokens - len(tokens)))
        return tokens
