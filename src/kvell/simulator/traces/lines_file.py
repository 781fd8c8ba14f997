"""Files of lines, gzipped if the name ends in ``.gz``."""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, cast

from typing_extensions import override

MOST_LINE_CHARS = 1 << 22
MOST_BLANK_LINES = 1 << 16
"""The most blank lines in a row."""
MOST_EXPANSION = 64
FREE_BYTES = 2 << 20
"""The most bytes of a gzipped file for each byte that is read of it, after the first bytes.

Traces shrink six- to thirteenfold.
"""


class _BoundedGzip(gzip.GzipFile):
    """A gzipped file that is read until it expands like no trace."""

    def __init__(self, path: Path) -> None:
        self._compressed = path.open("rb")
        super().__init__(fileobj=self._compressed)
        self._expanded_bytes = 0

    @override
    def read1(self, size: int = -1) -> bytes:
        data = super().read1(size)
        self._expanded_bytes += len(data)
        most_bytes = FREE_BYTES + MOST_EXPANSION * self._compressed.tell()
        if self._expanded_bytes > most_bytes:
            raise OSError(f"it expands more than {MOST_EXPANSION}-fold; unpack it first")
        return data

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._expanded_bytes = 0  # a trace is only read again from its beginning
        return super().seek(offset, whence)

    @override
    def close(self) -> None:
        super().close()
        self._compressed.close()


def open_lines(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    """Open a text file of lines; a byte order mark at its beginning is not read.

    :raises OSError: if it cannot be opened.
    """
    encoding = "utf-8-sig" if mode == "rt" else "utf-8"
    if path.suffix == ".gz":
        if mode == "wt":
            return cast(IO[str], gzip.open(path, mode, encoding=encoding))
        return io.TextIOWrapper(_BoundedGzip(path), encoding=encoding)
    return path.open(mode, encoding=encoding)


def filled_lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1.

    :raises OSError: if a line is too long to be one, or too many in a row are blank.
    """
    number = 0
    last = 0
    while line := file.readline(MOST_LINE_CHARS):
        number += 1
        if len(line) >= MOST_LINE_CHARS:
            raise OSError(f"line {number} is longer than {MOST_LINE_CHARS} characters")
        if not line.isspace():
            last = number
            yield number, line
        elif number - last > MOST_BLANK_LINES:
            raise OSError(f"it has more than {MOST_BLANK_LINES} blank lines after line {last}")
