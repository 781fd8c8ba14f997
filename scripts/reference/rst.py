"""Pieces of reStructuredText: titles, tables and lists of pages."""

from collections.abc import Iterable, Sequence
from textwrap import indent

UNDERLINES = "=-~"


def heading(title: str, level: int = 0, anchor: str = "") -> str:
    """Return a title with its underline, and before it a label to link to, if one is given."""
    label = f".. _{anchor}:\n\n" if anchor else ""
    return f"{label}{title}\n{UNDERLINES[level] * max(3, len(title))}\n"


def code(text: str) -> str:
    """Return literal text for a table or a paragraph; nothing for nothing."""
    return f"``{text}``" if text else ""


def table(columns: Sequence[str], widths: Sequence[int], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a cell may have several paragraphs.

    :param widths: of the columns, relative to each other.
    """
    head = [
        ".. list-table::",
        "   :header-rows: 1",
        f"   :widths: {' '.join(str(width) for width in widths)}",
        "",
    ]
    return "\n".join(head) + "\n" + "".join(_row(cells) for cells in (columns, *rows))


def _row(cells: Sequence[str]) -> str:
    shown = [indent(cell, " " * 7).lstrip() for cell in cells]
    first, *others = shown
    return f"   * - {first}\n" + "".join(f"     - {cell}\n" for cell in others)


def contents(pages: Iterable[str], caption: str = "", *, hidden: bool = False) -> str:
    """Return a list of links to pages, which makes them chapters of this one."""
    options = [":maxdepth: 1"]
    options += [f":caption: {caption}"] if caption else []
    options += [":hidden:"] if hidden else []
    lines = [".. toctree::", *(f"   {option}" for option in options), ""]
    return "\n".join([*lines, *(f"   {page}" for page in pages)]) + "\n"


def page(*parts: str) -> str:
    """Return a page of parts with an empty line between them."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
