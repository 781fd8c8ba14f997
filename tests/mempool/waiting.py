from pathlib import Path

from kvell.mempool.pool import MemPool

PATIENCE_SECONDS = 30.0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def used_pages(pool: MemPool) -> int:
    return sum(pool.core.snapshot().used)
