"""Reader and writer of trace files, gzipped or not; ``rows`` defines our own format."""

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.simulator.traces.formats.bailian import BAILIAN, bailian_rows
from kvell.simulator.traces.formats.fields import Fields, parsed_object, wrong
from kvell.simulator.traces.formats.json_array import (
    CONVERSATIONS,
    CountTokens,
    approximate_tokens,
    array_rows,
    begins_with_array,
    conversation_rows,
)
from kvell.simulator.traces.formats.line_formats import LineFormat, format_of
from kvell.simulator.traces.formats.mooncake import MOONCAKE, mooncake_row
from kvell.simulator.traces.formats.tables import Line, table_rows
from kvell.simulator.traces.lines_file import filled_lines, open_lines
from kvell.simulator.traces.rows import (
    MAX_IMAGE_ID,
    ImageRow,
    TraceRow,
    continuation_problem,
)

OWN = LineFormat(
    "Kvell's",
    frozenset({"arrival_s", "prompt_tokens", "output_tokens"}),
    frozenset({"block_hashes", "block_tokens", "session", "images", "continues", "will_return"}),
)
SHAREGPT = LineFormat("ShareGPT's", frozenset({CONVERSATIONS}), takes_more=True)
FORMATS = OWN, MOONCAKE, BAILIAN, SHAREGPT
"""The formats of JSON lines."""
LEAST_COVERED = 2 / 3
"""The least part of the prompts that blocks of the right size cover."""
Notice = Callable[[str], None]
"""Receiver of a sentence for the user."""


def _ignore(sentence: str) -> None:
    """Take a sentence and do nothing."""


def read_trace(
    path: Path,
    limit: int | None = None,
    count_tokens: CountTokens = approximate_tokens,
    notice: Notice = _ignore,
    *,
    block_tokens: int | None = None,
) -> list[TraceRow]:
    """Read the first ``limit`` requests of a file of our own or of a public format.

    Lines of our own format must be sorted by arrival. Requests of public formats are sorted, and
    their times count from the first; those without prompt or output tokens are left out.

    :param count_tokens: counts the tokens of texts, if the format has texts.
    :param block_tokens: tokens of a block of the prompt that an id is of; None: as the format or
        the file says.
    :raises ChangeSomething: naming file, line and field of the first error.
    """
    try:
        with open_lines(path, "rt") as file:
            is_array = begins_with_array(file)
            file.seek(0)
            if is_array:
                rows = _published(array_rows(path, file, count_tokens), limit, notice)
            else:
                each = filled_lines(file)
                rows = _of_lines(path, each, limit, count_tokens, notice, block_tokens)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        problem = f"cannot be read ({error})"
        raise ChangeSomething("--trace", path, problem, "give a readable file") from error
    if not rows:
        raise ChangeSomething("--trace", path, "holds no request", "give a trace with lines")
    if block_tokens is not None and not any(len(row.block_ids) for row in rows):
        problem = f"does not apply to {path}, which has no ids of blocks"
        raise ChangeSomething("--block-tokens", block_tokens, problem, "leave the flag out")
    return rows


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
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


def _of_lines(
    path: Path,
    lines: Iterator[Line],
    limit: int | None,
    count_tokens: CountTokens,
    notice: Notice,
    block_tokens: int | None,
) -> list[TraceRow]:
    """Read a file of lines; all fields of the first line identify the format."""
    first = next(lines, None)
    if first is None:
        return []
    lines = itertools.chain([first], lines)
    if not first[1].lstrip().startswith("{"):
        return _published(table_rows(path, lines), limit, notice)
    place = f"{path}:{first[0]}"
    format_ = format_of(place, parsed_object(place, first[1]), FORMATS)
    objects = _objects(path, lines, format_)
    if format_ is MOONCAKE:
        rows = (mooncake_row(fields, block_tokens) for fields in objects)
        return _published(rows, limit, notice)
    if format_ is BAILIAN:
        return _published(bailian_rows(objects, block_tokens), limit, notice)
    if format_ is SHAREGPT:
        each = (
            row
            for index, fields in enumerate(objects)
            for row in conversation_rows(fields, index, count_tokens)
        )
        return _published(each, limit, notice)
    return list(itertools.islice(_own_rows(objects, block_tokens), limit))


def _objects(path: Path, lines: Iterable[Line], format_: LineFormat) -> Iterator[Fields]:
    for number, line in lines:
        place = f"{path}:{number}"
        raw = parsed_object(place, line)
        format_.check_fields(place, raw)
        yield Fields(place, raw)


def _published(rows: Iterable[TraceRow], limit: int | None, notice: Notice) -> list[TraceRow]:
    """Return the first requests that have tokens, sorted, with times from the first of them."""
    served: list[TraceRow] = []
    num_empty = 0
    for row in rows:
        if row.prompt_tokens and row.output_tokens:
            served.append(row)
        else:
            num_empty += 1
        if len(served) == limit:
            break
    if num_empty:
        notice(f"left out requests without prompt or output tokens: {num_empty}")
    _notice_uncovered(served, notice)
    begin_s = min((row.arrival_s for row in served), default=0.0)
    shifted = [replace(row, arrival_s=row.arrival_s - begin_s) for row in served]
    return sorted(shifted, key=lambda row: row.arrival_s)


def _notice_uncovered(rows: Iterable[TraceRow], notice: Notice) -> None:
    hashed = [row for row in rows if len(row.block_ids)]
    covered = sum(len(row.block_ids) * row.block_tokens for row in hashed)
    tokens = sum(row.prompt_tokens for row in hashed)
    if covered < LEAST_COVERED * tokens:
        notice(
            f"blocks of {hashed[0].block_tokens} tokens cover {covered / tokens:.0%} of the "
            "prompts with hash_ids; if blocks are larger, give --block-tokens"
        )


def _own_rows(objects: Iterable[Fields], block_tokens: int | None) -> Iterator[TraceRow]:
    order = _Order()
    for fields in objects:
        row = _own_row(fields, block_tokens)
        order.check(fields.place, row)
        yield row


class _Order:
    """Check of a line against the lines above it."""

    def __init__(self) -> None:
        self._before_s, self._block_tokens = 0.0, 0
        self._sessions: dict[str | None, TraceRow] = {}

    def check(self, place: str, row: TraceRow) -> None:
        """Check the next row.

        :raises ChangeSomething: if it contradicts those above.
        """
        if row.arrival_s < self._before_s:
            raise wrong(place, "arrival_s", "is earlier than the previous line")
        if self._block_tokens and row.block_tokens not in (0, self._block_tokens):
            raise wrong(place, "block_tokens", f"is {self._block_tokens} above")
        if problem := continuation_problem(row, self._sessions.get(row.session)):
            raise wrong(place, "continues", problem)
        self._before_s = row.arrival_s
        self._block_tokens = self._block_tokens or row.block_tokens
        if row.session is not None:
            self._sessions[row.session] = row


def _own_row(fields: Fields, block_tokens: int | None) -> TraceRow:
    ids = fields.block_ids("block_hashes")
    size = block_tokens if block_tokens or not len(ids) else fields.whole_number("block_tokens")
    prompt_tokens = fields.whole_number("prompt_tokens")
    row = TraceRow(
        fields.seconds("arrival_s"),
        prompt_tokens,
        fields.whole_number("output_tokens"),
        ids,
        size if size and len(ids) else 0,
        fields.optional_text("session"),
        _images(fields, prompt_tokens),
        fields.flag("continues") or False,
        fields.flag("will_return"),
    )
    fields.check_blocks("block_hashes", ids, prompt_tokens, row.block_tokens)
    return row


def _images(fields: Fields, prompt_tokens: int) -> tuple[ImageRow, ...]:
    """Read images; each starts no earlier than the one before it, and inside the prompt."""
    images: list[ImageRow] = []
    for image in fields.objects("images"):
        start = image.whole_number("start", 0)
        if images and start < images[-1].start:
            raise image.wrong("start", f"is {start}, before the image above")
        if start >= prompt_tokens:
            raise image.wrong(
                "start", f"is {start}, after the end of a prompt of {prompt_tokens} tokens"
            )
        images.append(
            ImageRow(start, image.whole_number("tokens"), image.whole_number("id", 0, MAX_IMAGE_ID))
        )
    return tuple(images)
