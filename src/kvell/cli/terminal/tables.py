"""Tables with names on the left and figures on the right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

UNBOUNDED_COLUMNS = 10_000
"""A width that no table has."""


def made_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()
) -> "Table":
    """Return a table with a title, a line under its headers, and no truncated cells.

    :param texts: headers of columns that are aligned to the left, besides the first column.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(headers):
        is_text = number == 0 or header in texts
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class FittingTable:
    """A table that leaves out columns on a narrow terminal.

    :param least_first: headers of columns that may be left out, the least important first.
    :param texts: headers of columns that are aligned to the left, besides the first column.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    least_first: Sequence[str]
    texts: Sequence[str] = ()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Table]":
        """Yield the table with as many columns as the width has room for."""
        from rich.measure import Measurement

        unbounded = options.update(width=UNBOUNDED_COLUMNS)
        for count in range(len(self.least_first) + 1):
            table = self._table(self.least_first[:count])
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                break
        yield table

    def _table(self, left_out: Sequence[str]) -> "Table":
        places = [n for n, header in enumerate(self.headers) if header not in left_out]
        headers = [self.headers[n] for n in places]
        rows = [[row[n] for n in places] for row in self.rows]
        return made_table(self.title, headers, rows, self.texts)
