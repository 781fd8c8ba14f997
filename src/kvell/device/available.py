"""How much memory this process may still use, and the KV pool it gets when nobody says."""

from pathlib import Path

from kvell.vocabulary import GIB, MIB

_SHARE = 0.25
_LARGEST_BYTES = 16 * GIB
_SMALLEST_BYTES = 64 * MIB
_CGROUP_PAIRS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def default_kv_memory_bytes(available_bytes: int) -> int:
    """A quarter of what is available, between 64 MiB and 16 GiB, in whole 2 MiB chunks.

    The upper bound keeps a large machine from spending minutes on mapping memory
    that one model on a CPU cannot fill.
    """
    share_bytes = int(available_bytes * _SHARE) // (2 * MIB) * (2 * MIB)
    return max(_SMALLEST_BYTES, min(share_bytes, _LARGEST_BYTES))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes the system says are available, or what the cgroup leaves if that is less.

    :param root: where ``proc`` and ``sys`` lie.
    """
    limits = [_meminfo_bytes(root / "proc/meminfo")]
    limits += [_headroom_bytes(root / limit, root / usage) for limit, usage in _CGROUP_PAIRS]
    return min((limit for limit in limits if limit is not None), default=GIB)


def _meminfo_bytes(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _headroom_bytes(limit: Path, usage: Path) -> int | None:
    """What a cgroup has left; None where there is no such file or no limit."""
    numbers = [line.strip() for path in (limit, usage) for line in _lines(path)[:1]]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return None
    return max(0, int(numbers[0]) - int(numbers[1]))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
