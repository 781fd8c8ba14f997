"""Pools of other processes of this host, mapped read-only behind one's own.

A neighbour's large pages continue the numbers of one's own (:mod:`.transports.places`).  So a page
of a neighbour is named by one number, like a page of one's own, and whatever reads pages reads it
without being told where it lies (Infinite-LLM §4: attention over KV that other instances hold).
"""

import threading

from kvell.device.host import CHUNK_BYTES
from kvell.device.host_chunks import HostChunks
from kvell.mempool.transports.places import Places, num_places, place_bytes


class Neighbours:
    """The places behind one's own pool, and who is mapped there.  Safe to call from any thread.

    :param device: of one's own pool, which begins at its home address.
    :param pool_bytes: of one's own pool.
    :ivar most: places, each for a pool as large as one's own.
    """

    def __init__(self, device: HostChunks, pool_bytes: int, large_page_bytes: int) -> None:
        self._device, self._large_page_bytes = device, large_page_bytes
        place = place_bytes(pool_bytes, large_page_bytes)
        room = device.home.size_bytes + device.beyond_bytes - place
        self._places = Places(pool_bytes, large_page_bytes, max(0, room // place))
        self.most = len(self._places)
        self._mapped: dict[int, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def beyond_bytes(pool_bytes: int, large_page_bytes: int, most: int) -> int:
        """Return the addresses to reserve behind a pool for :func:`.num_places` neighbours."""
        place = place_bytes(pool_bytes, large_page_bytes)
        home_bytes = -(-pool_bytes // CHUNK_BYTES) * CHUNK_BYTES
        count = num_places(pool_bytes, large_page_bytes, most)
        return place - home_bytes + count * place if count else 0

    def map(self, descriptor: int, pool_bytes: int) -> int:
        """Map a neighbour's pool; return the number of its first large page.

        :param descriptor: of the memfd that its pool is, of at least ``pool_bytes``; it stays the
            caller's.
        :raises TryLater: if no places are left, or the system refuses.
        """
        with self._lock:
            first = self._places.first_free(pool_bytes)
            self._device.map_beyond(first * self._large_page_bytes, descriptor, pool_bytes)
            self._places.set_taken(first, pool_bytes, True)
            self._mapped[first] = pool_bytes
            return first

    def unmap(self, first_large: int) -> None:
        """Forget a neighbour; nothing may read its pages any more.

        :raises ValueError: if no neighbour begins there.
        """
        with self._lock:
            if first_large not in self._mapped:
                raise ValueError(f"no neighbour's pool begins at large page {first_large}")
            pool_bytes = self._mapped.pop(first_large)
            if self._device.unmap_beyond(first_large * self._large_page_bytes, pool_bytes):
                self._places.set_taken(first_large, pool_bytes, False)
