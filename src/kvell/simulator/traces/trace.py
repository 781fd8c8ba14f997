"""Reads and writes trace files: JSON lines, gzipped or not; ``rows`` defines the fields."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvell.errors import ChangeSomething
from kvell.simulator.traces.lines_file import open_lines
from kvell.simulator.traces.rows import (
    MAX_IMAGE_ID,
    BlockIds,
    ImageRow,
    TraceRow,
    continuation_problem,
    ideal_hit_rate,
    ideal_hit_tokens,
    repeated,
)
from kvell.wire.decoding import MalformedError, decode_json

__all__ = [
    "BlockIds",
    "ImageRow",
    "TraceRow",
    "ideal_hit_rate",
    "ideal_hit_tokens",
    "read_trace",
    "repeated",
    "write_trace",
]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Read the first ``limit`` requests of a file, which must be sorted by arrival.

    :raises ChangeSomething: naming file, line and field of the first error.
    """
    try:
        with open_lines(path, "rt") as file:
            rows = list(_rows(path, itertools.islice(file, limit)))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error})"
        raise ChangeSomething("--trace", path, problem, "give a readable file") from error
    if not rows:
        raise ChangeSomething("--trace", path, "holds no request", "give a trace with lines")
    return rows


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write rows as a trace, gzipped if the name ends in ``.gz``."""
    with open_lines(path, "wt") as file:
        file.writelines(json.dumps(_as_dict(row)) + "\n" for row in rows)


def _as_dict(row: TraceRow) -> dict[str, Any]:
    written: dict[str, Any] = {
        "arrival_s": row.arrival_s,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
    }
    if len(row.block_ids):
        written |= {"block_hashes": row.block_ids.tolist(), "block_tokens": row.block_tokens}
    if row.session is not None:
        written["session"] = row.session
    if row.images:
        written["images"] = [asdict(image) for image in row.images]
    if row.continues:
        written["continues"] = True
    return written if row.will_return is None else written | {"will_return": row.will_return}


def _rows(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    order = _Order()
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        row = _Line(place, _object(place, line)).row()
        order.check(place, row)
        yield row


class _Order:
    """Checks a line against the lines above it."""

    def __init__(self) -> None:
        self._before_s, self._block_tokens = 0.0, 0
        self._sessions: dict[str | None, TraceRow] = {}

    def check(self, place: str, row: TraceRow) -> None:
        """Take the next row.

        :raises ChangeSomething: if it contradicts those above.
        """
        if row.arrival_s < self._before_s:
            raise _wrong(place, "arrival_s", "is before the line above")
        if self._block_tokens and row.block_tokens not in (0, self._block_tokens):
            raise _wrong(place, "block_tokens", f"is {self._block_tokens} above")
        if problem := continuation_problem(row, self._sessions.get(row.session)):
            raise _wrong(place, "continues", problem)
        self._before_s = row.arrival_s
        self._block_tokens = self._block_tokens or row.block_tokens
        if row.session is not None:
            self._sessions[row.session] = row


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        raw = decode_json(line)
    except MalformedError as error:
        raise _wrong(place, "line", f"is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _wrong(place, "line", "is no JSON object")
    return raw


@dataclass(frozen=True)
class _Line:
    """One line's object, or an object inside it, and its place in the file."""

    place: str
    raw: dict[str, Any]
    within: str = ""

    def row(self) -> TraceRow:
        ids = self._shared_ids()
        prompt_tokens = self._whole("prompt_tokens")
        row = TraceRow(
            self._number("arrival_s"),
            prompt_tokens,
            self._whole("output_tokens"),
            ids,
            self._whole("block_tokens") if len(ids) else 0,
            self._session(),
            self._images(prompt_tokens),
            self._flag("continues") or False,
            self._flag("will_return"),
        )
        if len(ids) > -(-row.prompt_tokens // max(1, row.block_tokens)):
            raise self._wrong("block_hashes", "are more than the prompt has blocks")
        return row

    def image(self, lowest: int, prompt_tokens: int) -> ImageRow:
        """Read an image; it must start no earlier than the one before it, and inside the prompt."""
        start = self._whole("start", 0)
        if start < lowest:
            raise self._wrong("start", f"is {start}, before the image above")
        if start >= prompt_tokens:
            raise self._wrong("start", f"is {start}, behind a prompt of {prompt_tokens} tokens")
        return ImageRow(start, self._whole("tokens"), self._whole("id", 0, MAX_IMAGE_ID))

    def _number(self, name: str) -> float:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise self._wrong(name, f"is {value!r}, not a number of at least 0")
        return float(value)

    def _whole(self, name: str, low: int = 1, high: int | None = None) -> int:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._wrong(name, f"is {value!r}, not a whole number of at least {low}")
        if high is not None and value > high:
            raise self._wrong(name, f"is {value!r}, above {high}")
        return value

    def _flag(self, name: str) -> bool | None:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self._wrong(name, f"is {value!r}, neither true nor false")
        return value

    def _session(self) -> str | None:
        value = self.raw.get("session")
        if value is not None and not isinstance(value, str):
            raise self._wrong("session", f"is {value!r}, not text")
        return value

    def _images(self, prompt_tokens: int) -> tuple[ImageRow, ...]:
        listed = self.raw.get("images") or []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise self._wrong("images", "is no list of objects")
        found: list[ImageRow] = []
        for number, raw in enumerate(listed):
            lowest = found[-1].start if found else 0
            line = _Line(self.place, raw, f"images[{number}].")
            found.append(line.image(lowest, prompt_tokens))
        return tuple(found)

    def _shared_ids(self) -> BlockIds:
        try:
            ids = np.asarray(self.raw.get("block_hashes") or [])
        except ValueError:
            ids = np.asarray([""])
        if len(ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise self._wrong("block_hashes", "is no list of whole numbers")
        return ids.astype(np.int64)

    def _wrong(self, name: str, problem: str) -> ChangeSomething:
        return _wrong(self.place, self.within + name, problem)


def _wrong(place: str, name: str, problem: str) -> ChangeSomething:
    return ChangeSomething("--trace", place, f"{name} {problem}", "repair that line")
