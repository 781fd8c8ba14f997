"""Pools over small layouts, and contents that can be told apart."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvell.memory import GroupKind, LayerSpec, Layout, plan_layout
from kvell.mempool.buffer import Lease
from kvell.mempool.pool import MemPool
from kvell.mempool.rendezvous import PageTransport

SECRET = b"of the test, of enough bytes"
FULL = LayerSpec(0, GroupKind.FULL, 1, 8, 2)
WINDOW = LayerSpec(1, GroupKind.SLIDING, 2, 8, 2, window_tokens=20)
STATE = LayerSpec(2, GroupKind.STATE, 0, 0, 2, state_bytes=640)
MIXES = {
    "full": [FULL],
    "window": [FULL, WINDOW],
    "state": [FULL, STATE],
    "all": [FULL, WINDOW, STATE],
}


def layout_of(mix: str, large_pages: int = 64) -> Layout:
    large = plan_layout(MIXES[mix], 1 << 20).large_page_bytes
    return plan_layout(MIXES[mix], large * large_pages)


def pool_at(
    folder: Path,
    name: str,
    mix: str = "all",
    large_pages: int = 64,
    content: str = "",
    transport: PageTransport = "memory",
) -> MemPool:
    layout = layout_of(mix, large_pages)
    address = folder / name if transport == "memory" else "tcp://127.0.0.1:0"
    return MemPool(layout, instance=name, address=address, secret=SECRET, content=content)


def write(pool: MemPool, lease: Lease, tokens: Sequence[int]) -> None:
    for address in lease.addresses:
        view = pool.view(address)
        told = content(pool, address.group, address.position, tokens, len(view))
        view[:] = np.frombuffer(told, np.uint8)


def content(pool: MemPool, group: int, position: int, tokens: Sequence[int], size: int) -> bytes:
    spec = pool.layout.groups[group]
    known = tokens
    if spec.kind is not GroupKind.STATE:
        known = tokens[: (position + 1) * spec.page_tokens]
    seed = [group, position, *known]
    return np.random.default_rng(seed).bytes(size)


def holds_right(pool: MemPool, lease: Lease, tokens: Sequence[int]) -> bool:
    return all(
        bytes(pool.view(a)) == content(pool, a.group, a.position, tokens, len(pool.view(a)))
        for a in lease.addresses
    )


def fill(pool: MemPool, tokens: Sequence[int], root: str = "") -> None:
    lease = pool.alloc_mem(tokens=len(tokens))
    write(pool, lease, tokens)
    pool.insert(tokens, lease, root=root)
