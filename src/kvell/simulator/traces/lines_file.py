"""Files of JSON lines, gzipped if the name ends in ``.gz``."""

import gzip
from pathlib import Path
from typing import IO, Literal


def open_lines(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    """Open a text file of lines.

    :raises OSError: if it cannot be opened.
    """
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")
    return path.open(mode, encoding="utf-8")
