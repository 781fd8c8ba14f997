"""What a process takes of the machine's memory, as the system counts it; and giving back."""

import contextlib
import ctypes
from pathlib import Path

from kvell.vocabulary import KIB

COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""Files that are mapped (libraries, weights as they lie on disk) can be given up at any time."""


def process_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """Anonymous and shared memory of a process, what it shares divided among all that do.

    0 where the system does not say.

    :param pid: None for this process.
    :param root: where ``proc`` lies.
    """
    try:
        lines = (root / f"proc/{pid or 'self'}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(COUNTED))


def tree_bytes(pid: int, root: Path = Path("/")) -> int:
    """The same of a process and all that it has started, each page counted once.

    :param root: where ``proc`` lies.
    """
    lists = (root / f"proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError):
        started = [int(child) for one in lists for child in one.read_text().split()]
        return process_bytes(pid, root) + sum(tree_bytes(child, root) for child in started)
    return process_bytes(pid, root)


def give_back_freed() -> None:
    """Let the system have what was freed and the C library keeps for later (glibc; else nothing).

    After a model's weights were packed that is as much as the weights were.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
