"""Pools of other processes on this host, mapped read-only after this process's pool.

A neighbour's large pages continue the page numbers of this pool (:mod:`.transports.places`).  So
one number names any page, local or a neighbour's, and kernels read both in the same way
(Infinite-LLM §4: attention over KV that other instances hold).
"""

import threading

from kvell.device.host import CHUNK_BYTES
from kvell.device.host_chunks import HostChunks
from kvell.mempool.transports.places import MappingSlots, num_places, place_bytes


class MappedPeers:
    """The pools mapped after this pool.  Any thread may call the methods.

    :param device: the device of this pool, which begins at its home address.
    :param pool_bytes: the size of this pool.
    :ivar most: the number of places, each for a pool as large as this one.
    """

    def __init__(self, device: HostChunks, pool_bytes: int, large_page_bytes: int) -> None:
        self._device, self._large_page_bytes = device, large_page_bytes
        place = place_bytes(pool_bytes, large_page_bytes)
        room = device.home.size_bytes + device.beyond_bytes - place
        self._places = MappingSlots(pool_bytes, large_page_bytes, max(0, room // place))
        self.most = len(self._places)
        self._mapped: dict[int, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def beyond_bytes(pool_bytes: int, large_page_bytes: int, most: int) -> int:
        place = place_bytes(pool_bytes, large_page_bytes)
        home_bytes = -(-pool_bytes // CHUNK_BYTES) * CHUNK_BYTES
        count = num_places(pool_bytes, large_page_bytes, most)
        return place - home_bytes + count * place if count else 0

    def map(self, descriptor: int, pool_bytes: int) -> int:
        """Map a neighbour's pool; return the number of its first large page.

        :param descriptor: of the pool's memfd, of at least ``pool_bytes``; the caller keeps it.
        :raises TryLater: if no places are left, or the system refuses.
        """
        with self._lock:
            first = self._places.first_free(pool_bytes)
            self._device.map_beyond(first * self._large_page_bytes, descriptor, pool_bytes)
            self._places.set_taken(first, pool_bytes, True)
            self._mapped[first] = pool_bytes
            return first

    def unmap(self, first_large: int) -> None:
        """Unmap a neighbour's pool, whose pages must not be read any more.

        :raises ValueError: if no neighbour begins there.
        """
        with self._lock:
            if first_large not in self._mapped:
                raise ValueError(f"no peer's pool begins at large page {first_large}")
            pool_bytes = self._mapped.pop(first_large)
            if self._device.unmap_beyond(first_large * self._large_page_bytes, pool_bytes):
                self._places.set_taken(first_large, pool_bytes, False)
