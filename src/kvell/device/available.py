"""The memory that this process may still use, and the default size of the KV pool."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

from kvell.vocabulary import GIB, KIB, MIB

_SHARE = 0.25
_LARGEST_BYTES = 16 * GIB
_SMALLEST_BYTES = 64 * MIB
# Mount point of each cgroup version, files of its limit and usage, and the key of the part of the
# usage that can be reclaimed.
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def default_kv_memory_bytes(available_bytes: int) -> int:
    """Return a quarter of ``available_bytes``, between 64 MiB and 16 GiB, in whole 2 MiB chunks.

    The upper bound keeps a large machine from spending minutes on mapping memory that one model on
    a CPU cannot fill.
    """
    share_bytes = int(available_bytes * _SHARE) // (2 * MIB) * (2 * MIB)
    return max(_SMALLEST_BYTES, min(share_bytes, _LARGEST_BYTES))


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that the system reports as available, or that a cgroup leaves if less.

    All cgroups count, from the process's own up to the mounted root.
    """
    limits = [_meminfo_bytes(root / "proc/meminfo")]
    limits += [
        _headroom_bytes(folder / limit, folder / usage, folder / "memory.stat", reclaimable)
        for mount, limit, usage, reclaimable in _CGROUPS
        for folder in _cgroup_folders(root, root / mount)
    ]
    return min((limit for limit in limits if limit is not None), default=GIB)


def _meminfo_bytes(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_folders(root: Path, mount: Path) -> Iterator[Path]:
    folders = {mount}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        folder = mount
        for name in Path(path.lstrip("/")).parts:
            folder /= name
            folders.add(folder)
    return iter(folders)


def _headroom_bytes(limit: Path, usage: Path, stat: Path, reclaimable: str) -> int | None:
    """Return the bytes that a cgroup leaves; None without such a file or a limit.

    File pages without recent use are reclaimed under pressure, so they count as free.
    """
    numbers = [line.strip() for path in (limit, usage) for line in _lines(path)[:1]]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return None
    pairs = (line.split() for line in _lines(stat))
    spare_bytes = sum(int(pair[1]) for pair in pairs if pair[0] == reclaimable)
    return max(0, int(numbers[0]) - int(numbers[1]) + spare_bytes)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""Counted memory: mapped files (libraries, weights on disk) can be dropped at any time."""


def process_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """Return a process's anonymous memory and its portion of shared memory.

    A shared page is divided among its processes. The result is 0 if the system does not report it.

    :param pid: None for this process.
    """
    try:
        lines = (root / f"proc/{pid or 'self'}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(COUNTED))


def tree_bytes(pid: int, root: Path = Path("/")) -> int:
    """Return the same for a process and all its descendants, each page counted once."""
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
