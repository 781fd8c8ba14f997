"""The memory of a process, as the system counts it; and the return of freed memory."""

import contextlib
import ctypes
from pathlib import Path

from kvell.vocabulary import KIB

COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""Counted memory: mapped files (libraries, weights on disk) can be dropped at any time."""


def process_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """Return a process's anonymous memory and its portion of shared memory.

    A shared page is divided among its processes. The result is 0 if the system does not report it.

    :param pid: None for this process.
    :param root: the parent of ``proc``.
    """
    try:
        lines = (root / f"proc/{pid or 'self'}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(COUNTED))


def tree_bytes(pid: int, root: Path = Path("/")) -> int:
    """Return the same for a process and all its descendants, each page counted once.

    :param root: the parent of ``proc``.
    """
    lists = (root / f"proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError):
        started = [int(child) for children in lists for child in children.read_text().split()]
        return process_bytes(pid, root) + sum(tree_bytes(child, root) for child in started)
    return process_bytes(pid, root)


def give_back_freed() -> None:
    """Return freed memory that the C library keeps to the system (glibc; else do nothing).

    After a model's weights were packed, that is as much as the weights were.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
