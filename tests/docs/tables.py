"""Rows of Markdown tables, found by their head."""

import re


def rows_under(markdown: str, *head: str) -> list[list[str]]:
    """Cells of every row of the only table whose head begins with these names."""
    found = []
    lines = markdown.splitlines()
    for number, line in enumerate(lines):
        if cells_of(line)[: len(head)] == list(head):
            found.append(number)
    [start] = found
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells_of(line))
    return rows


def cells_of(line: str) -> list[str]:
    """Cells of a row; none of a line that is no row."""
    if not line.startswith("|"):
        return []
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
