from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from kvell.device.host_chunks import HostChunks
from kvell.memory import GroupKind, LayerSpec, plan_layout
from kvell.mempool.entries import PeerEntry, PeerLost, PeerMapped
from kvell.mempool.node import PageTransferThread
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transports.lent_attention import LentAttention, RightsWords
from kvell.mempool.transports.neighbours import MappedPeers
from kvell.wire.endpoints import Endpoint
from tests.mempool.pools import SECRET

LAYOUT = plan_layout([LayerSpec(i, GroupKind.FULL, 1, 8, 2) for i in range(4)], 1 << 18)

(GROUP,) = LAYOUT.groups

PATIENCE_SECONDS = 30.0


@dataclass
class Start:
    """How an instance starts.

    :param places: for neighbours behind its pool.
    :param lends: makes what computes attention over what it lends.
    """

    name: str
    incarnation: int = 1
    places: int = 4
    fingerprint: str = "print"
    lends: Callable[[RightsWords], LentAttention] | None = None


class Instance:
    """A node over a pool with places for neighbours behind it."""

    def __init__(self, start: Start, address: Endpoint) -> None:
        self.entries: SimpleQueue[PeerEntry] = SimpleQueue()
        size = (LAYOUT.pool_bytes, LAYOUT.large_page_bytes)
        beyond_bytes = MappedPeers.beyond_bytes(*size, start.places)
        num_chunks = -(-LAYOUT.pool_bytes // HostChunks.chunk_bytes)
        self.device = HostChunks(num_chunks, beyond_bytes=beyond_bytes)
        home = np.frombuffer(self.device.view(self.device.home), np.uint8)
        self.memory = home[: LAYOUT.pool_bytes]
        self.seen = np.frombuffer(self.device.view_beyond(), np.uint8)
        self.node = PageTransferThread(
            *(start.name, start.incarnation, start.fingerprint, self._take),
            *(LAYOUT.groups, self.memory, self.device.descriptor),
            address=address,
            secret=SECRET,
            neighbours=MappedPeers(self.device, *size),
            lends=start.lends,
        )
        self.node.start()

    def _take(self, entry: PeerEntry) -> list[Action]:
        if isinstance(entry, PeerMapped | PeerLost):
            self.entries.put(entry)
        return []

    def next(self) -> PeerEntry:
        return self.entries.get(timeout=PATIENCE_SECONDS)

    def mapped(self) -> PeerMapped:
        entry = self.next()
        assert isinstance(entry, PeerMapped)
        return entry

    def page(self, page: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = page * GROUP.page_stride_bytes
        return self.seen[start : start + GROUP.page_bytes]

    def close(self) -> None:
        self.node.close()
        self.device.close()


class Host:
    """Instances in one folder, or of several hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[Instance] = []

    def start(self, start: Start, *, elsewhere: bool = False) -> Instance:
        path = self._folder / f"{start.name}{start.incarnation}"
        instance = Instance(start, "tcp://127.0.0.1:0" if elsewhere else path)
        self.running.append(instance)
        return instance

    def end(self, instance: Instance) -> None:
        self.running.remove(instance)
        instance.close()


def meet(one: Instance, other: Instance) -> None:
    assert other.node.address is not None
    one.node.connect(other.node.address)
