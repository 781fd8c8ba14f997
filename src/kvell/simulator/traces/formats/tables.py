"""Traces that are published as CSV: Azure's LLM inference traces, and BurstGPT."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.simulator.traces.formats.fields import Fields, name_list, show, wrong
from kvell.simulator.traces.formats.line_formats import LineFormat, format_of
from kvell.simulator.traces.rows import TraceRow

Line = tuple[int, str]
"""A line of a file and its number, from 1."""
REMEDY = (
    "give JSON lines of Kvell's, Mooncake's or Qwen-Bailian's format, the CSV of Azure's traces or "
    "of BurstGPT, or ShareGPT's JSON"
)


@dataclass(frozen=True)
class Table:
    """One format."""

    fields: LineFormat
    row: Callable[[Fields], TraceRow]


def table_rows(path: Path, lines: Iterable[Line]) -> Iterator[TraceRow]:
    """Yield the requests of a table; all columns of its header identify the format.

    :param lines: at least the header.
    :raises ChangeSomething: naming file, line and column of the first error.
    """
    cells = _cells(path, lines)
    number, header = next(cells)
    names = [name.strip() for name in header]
    place = f"{path}:{number}"
    if not any(table.fields.has_any(names) for table in TABLES):
        problem = "line is neither JSON nor the header of a known table"
        raise ChangeSomething("--trace", place, problem, REMEDY)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise wrong(place, "line", f"has {name_list(twice)} twice")
    fields = format_of(place, dict.fromkeys(names), [table.fields for table in TABLES])
    [table] = [table for table in TABLES if table.fields is fields]
    for number, values in cells:
        raw: Mapping[str, object] = {
            name: _value(text.strip()) for name, text in zip(names, values, strict=False)
        }
        yield table.row(Fields(f"{path}:{number}", raw))


def _cells(path: Path, lines: Iterable[Line]) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each line; a quoted cell never has a line's end in these formats."""
    for number, line in lines:
        try:
            yield number, next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise wrong(f"{path}:{number}", "line", f"is not a line of a CSV ({error})") from error


def _value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _azure_row(fields: Fields) -> TraceRow:
    text = fields.raw.get("TIMESTAMP")
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError as error:
        problem = f"is {show(text)}, not a time such as 2023-11-16 18:15:46.680590"
        raise fields.wrong("TIMESTAMP", problem) from error
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return TraceRow(
        at.timestamp(),
        fields.whole_number("ContextTokens", low=0),
        fields.whole_number("GeneratedTokens", low=0),
    )


def _burst_row(fields: Fields) -> TraceRow:
    session = fields.raw.get("Session ID")
    return TraceRow(
        fields.seconds("Timestamp"),
        fields.whole_number("Request tokens", low=0),
        fields.whole_number("Response tokens", low=0),
        session=None if session in (None, "") else str(session),
    )


TABLES = (
    Table(
        LineFormat("Azure's", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})),
        _azure_row,
    ),
    Table(
        LineFormat(
            "BurstGPT's",
            frozenset({"Timestamp", "Request tokens", "Response tokens"}),
            frozenset({"Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"}),
        ),
        _burst_row,
    ),
)
