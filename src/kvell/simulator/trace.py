"""Request traces: one JSON object per line, gzipped or not.

A block id stands for the content of a run of ``block_tokens`` prompt tokens together
with everything before it, so two prompts share exactly their longest common run of
leading ids.  ("Block" is the word of the trace format; it is no page.)
"""

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething

BlockIds = npt.NDArray[np.int64]


def _no_ids() -> BlockIds:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class TraceRow:
    """One request.

    :param arrival_s: seconds after the first request.
    :param block_ids: int64 [b], ids of the prompt's leading blocks; what has no id is unique.
    :param block_tokens: tokens of a block; 0 without ids.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: BlockIds = field(default_factory=_no_ids)
    block_tokens: int = 0
    session: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first ``limit`` requests of a file, sorted by arrival as the file must be.

    :raises ChangeSomething: naming file, line and field of whatever is wrong.
    """
    try:
        with _open(path, "rt") as file:
            rows = list(_rows(path, itertools.islice(file, limit)))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error})"
        raise ChangeSomething("--trace", path, problem, "give a readable file") from error
    if not rows:
        raise ChangeSomething("--trace", path, "holds no request", "give a trace with lines")
    return rows


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write rows as a trace, gzipped where the name ends in ``.gz``."""
    with _open(path, "wt") as file:
        file.writelines(json.dumps(_as_dict(row)) + "\n" for row in rows)


def repeated(rows: Sequence[TraceRow], times: int) -> list[TraceRow]:
    """The trace, then again ``times - 1`` times with the same ids, each shifted by its span."""
    span_s = rows[-1].arrival_s - rows[0].arrival_s
    return [
        replace(row, arrival_s=row.arrival_s + turn * span_s)
        for turn in range(times)
        for row in rows
    ]


def ideal_hit_rate(rows: Sequence[TraceRow]) -> float:
    """Hit rate of a cache that never evicts, one request after the other, whole blocks only.

    A prompt's last token is always computed.
    """
    seen: set[int] = set()
    hit_tokens = 0
    for row in rows:
        size = max(1, row.block_tokens)
        ids = row.block_ids[: row.prompt_tokens // size].tolist()
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, ids))
        hit_tokens += min(known, (row.prompt_tokens - 1) // size) * size
        seen.update(ids)
    return hit_tokens / sum(row.prompt_tokens for row in rows)


def _open(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")
    return path.open(mode, encoding="utf-8")


def _as_dict(row: TraceRow) -> dict[str, Any]:
    written: dict[str, Any] = {
        "arrival_s": row.arrival_s,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
    }
    if len(row.block_ids):
        written |= {"block_hashes": row.block_ids.tolist(), "block_tokens": row.block_tokens}
    return written if row.session is None else written | {"session": row.session}


def _rows(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    before_s, block_tokens = 0.0, 0
    for number, line in enumerate(lines, start=1):
        row = _Line(f"{path}:{number}", _object(path, number, line)).row()
        if row.arrival_s < before_s:
            raise _wrong(f"{path}:{number}", "arrival_s", "is before the line above")
        if block_tokens and row.block_tokens not in (0, block_tokens):
            raise _wrong(f"{path}:{number}", "block_tokens", f"is {block_tokens} above")
        before_s, block_tokens = row.arrival_s, block_tokens or row.block_tokens
        yield row


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise _wrong(f"{path}:{number}", "line", f"is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _wrong(f"{path}:{number}", "line", "is no JSON object")
    return raw


@dataclass(frozen=True)
class _Line:
    """One line's object, and where it stands."""

    place: str
    raw: dict[str, Any]

    def row(self) -> TraceRow:
        ids = self._shared_ids()
        row = TraceRow(
            self._number("arrival_s"),
            self._whole("prompt_tokens"),
            self._whole("output_tokens"),
            ids,
            self._whole("block_tokens") if len(ids) else 0,
            self._session(),
        )
        if len(ids) > -(-row.prompt_tokens // max(1, row.block_tokens)):
            raise _wrong(self.place, "block_hashes", "are more than the prompt has blocks")
        return row

    def _number(self, name: str) -> float:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise _wrong(self.place, name, f"is {value!r}, not a number of at least 0")
        return float(value)

    def _whole(self, name: str) -> int:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _wrong(self.place, name, f"is {value!r}, not a whole number of at least 1")
        return value

    def _session(self) -> str | None:
        value = self.raw.get("session")
        if value is not None and not isinstance(value, str):
            raise _wrong(self.place, "session", f"is {value!r}, not text")
        return value

    def _shared_ids(self) -> BlockIds:
        try:
            ids = np.asarray(self.raw.get("block_hashes") or [])
        except ValueError:
            ids = np.asarray([""])
        if len(ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise _wrong(self.place, "block_hashes", "is no list of whole numbers")
        return ids.astype(np.int64)


def _wrong(place: str, name: str, problem: str) -> ChangeSomething:
    return ChangeSomething("--trace", place, f"{name} {problem}", "repair that line")
