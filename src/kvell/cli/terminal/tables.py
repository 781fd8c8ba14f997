"""Tables with names on the left and figures on the right."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def made_table(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> "Table":
    """Return a table with a title, a line under its headers, and no truncated cells."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
