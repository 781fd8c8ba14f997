"""Pools of other processes on this host, mapped read-only after this process's pool.

A neighbour's large pages continue the page numbers of this pool (:mod:`.transports.places`).  So
one number names any page, local or a neighbour's, and kernels read both in the same way
(Infinite-LLM §4: attention over KV that other instances hold).
"""

import math
import threading

from kvell.device.host import CHUNK_BYTES
from kvell.device.host_chunks import HostChunks
from kvell.errors import TryLater

MOST_NEIGHBOURS = 64
"""The number of places of an instance that shares its host with others."""
MOST_BEYOND_BYTES = 1 << 43
"""The most bytes of addresses, 8 TiB, that a process reserves for its neighbours: a sixteenth of
all addresses.  They cost nothing until a pool is mapped there."""


def place_bytes(pool_bytes: int, large_page_bytes: int) -> int:
    """Return the bytes of addresses for one neighbour with a pool of this size.

    The result is a multiple of a large page, so that page numbers continue after it, and of the
    system's huge pages, so that reads of a neighbour's pages cost no more than local reads.
    """
    step = math.lcm(large_page_bytes, CHUNK_BYTES)
    return -(-pool_bytes // step) * step


def num_places(pool_bytes: int, large_page_bytes: int, most: int = MOST_NEIGHBOURS) -> int:
    """Return the number of places to reserve after a pool: ``most``, or fewer if these take more
    than :data:`MOST_BEYOND_BYTES`."""
    return min(most, MOST_BEYOND_BYTES // place_bytes(pool_bytes, large_page_bytes))


class MappingSlots:
    """The free and taken places.  The first place begins at the end of the local pool's place.

    ::

        local pool               neighbour A                 neighbour B
        |L0|L1|L2| … |Ln-1| … |Ln|Ln+1| …            |Lm|Lm+1| …
        └ addresses of one reserved range; every large page at a multiple of its size ┘

    :param count: the number of places, each for a pool as large as the local one.
    """

    def __init__(self, pool_bytes: int, large_page_bytes: int, count: int) -> None:
        self._large_page_bytes = large_page_bytes
        self._place_bytes = place_bytes(pool_bytes, large_page_bytes)
        self._is_taken = [False] * count

    def __len__(self) -> int:
        return len(self._is_taken)

    def first_free(self, pool_bytes: int) -> int:
        """Return the first large page of free places that can hold a pool.

        :raises TryLater: if no places are left.
        """
        count = self._count(pool_bytes)
        for place in range(len(self._is_taken) - count + 1):
            if not any(self._is_taken[place : place + count]):
                return (1 + place) * self._place_bytes // self._large_page_bytes
        raise TryLater("device: no addresses left for a peer's pool")

    def set_taken(self, first_large: int, pool_bytes: int, taken: bool) -> None:
        """Mark the places of a pool that begins at a large page as taken or free."""
        count = self._count(pool_bytes)
        place = first_large * self._large_page_bytes // self._place_bytes - 1
        self._is_taken[place : place + count] = [taken] * count

    def _count(self, pool_bytes: int) -> int:
        return -(-pool_bytes // self._place_bytes)


class MappedPeers:
    """The pools mapped after this pool.  Any thread may call the methods.

    :param device: the device of this pool, which begins at its home address.
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
