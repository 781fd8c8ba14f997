"""Tables with names on the left and figures on the right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

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
    """A table that leaves out columns at a narrow width, and names them below.

    :param least_first: headers of columns that may be left out, the least important first.
    :param texts: headers of columns that are aligned to the left, besides the first column.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    least_first: Sequence[str]
    texts: Sequence[str] = ()

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Table | Text]":
        """Yield the table with as many columns as the width has room for."""
        from rich.measure import Measurement
        from rich.text import Text

        unbounded = options.update(width=UNBOUNDED_COLUMNS)
        may_leave = [header for header in self.least_first if header in self.headers]
        for count in range(len(may_leave) + 1):
            left_out = may_leave[:count]
            table = self._table(left_out)
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                break
        yield table
        if left_out:
            yield Text(f"No room for: {'; '.join(left_out)}")

    def _table(self, left_out: Sequence[str]) -> "Table":
        places = [n for n, header in enumerate(self.headers) if header not in left_out]
        headers = [self.headers[n] for n in places]
        rows = [[row[n] for n in places] for row in self.rows]
        return made_table(self.title, headers, rows, self.texts)
