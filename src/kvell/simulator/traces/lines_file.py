"""Files of lines, gzipped if the name ends in ``.gz``."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

MOST_LINE_CHARS = 1 << 26


def open_lines(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    """Open a text file of lines; a byte order mark at its beginning is not read.

    :raises OSError: if it cannot be opened.
    """
    encoding = "utf-8-sig" if mode == "rt" else "utf-8"
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding=encoding)
    return path.open(mode, encoding=encoding)


def filled_lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1.

    :raises OSError: if a line is too long to be one.
    """
    number = 0
    while line := file.readline(MOST_LINE_CHARS):
        number += 1
        if len(line) >= MOST_LINE_CHARS:
            raise OSError(f"line {number} is longer than {MOST_LINE_CHARS} characters")
        if not line.isspace():
            yield number, line
