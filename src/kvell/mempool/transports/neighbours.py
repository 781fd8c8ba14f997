"""Pools of other processes of this host, mapped read-only behind one's own.

::

    own pool                 neighbour A                 neighbour B
    |L0|L1|L2| … |Ln-1| … |Ln|Ln+1| …            |Lm|Lm+1| …
    └ addresses of one reserved range; every large page at a multiple of its size ┘

A neighbour's large pages continue the numbers of one's own.  So a page of a neighbour is named by
one number, like a page of one's own, and whatever reads pages reads it without being told where
it lies (Infinite-LLM §4: attention over KV that other instances hold).
"""

import math
import threading

from kvell.device.host import CHUNK_BYTES
from kvell.device.host_chunks import HostChunks
from kvell.errors import TryLater

MOST_BEYOND_BYTES = 1 << 43
"""Addresses at most, 8 TiB, that a process reserves for its neighbours: a sixteenth of what there
is.  They cost nothing until something is mapped there."""


def place_bytes(pool_bytes: int, large_page_bytes: int) -> int:
    """Return the addresses that one neighbour takes whose pool is as large as one's own.

    A multiple of a large page, so that numbers of pages go on behind it, and of what the system
    maps as a huge page, so that reading a neighbour costs no more than reading oneself.
    """
    step = math.lcm(large_page_bytes, CHUNK_BYTES)
    return -(-pool_bytes // step) * step


class Neighbours:
    """The places behind one's own pool, and who is mapped there.  Safe to call from any thread.

    :param device: of one's own pool, which begins at its home address.
    :param pool_bytes: of one's own pool.
    :ivar most: places, each for a pool as large as one's own.
    """

    def __init__(self, device: HostChunks, pool_bytes: int, large_page_bytes: int) -> None:
        self._device, self._large_page_bytes = device, large_page_bytes
        # The first place begins as far behind home's beginning as a place is long.
        self._place_bytes = place_bytes(pool_bytes, large_page_bytes)
        room = device.home.size_bytes + device.beyond_bytes - self._place_bytes
        self._is_taken = [False] * max(0, room // self._place_bytes)
        self.most = len(self._is_taken)
        self._mapped: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def beyond_bytes(pool_bytes: int, large_page_bytes: int, most: int) -> int:
        """Return the addresses to reserve behind a pool for so many neighbours like it; for fewer
        where that is more than :data:`MOST_BEYOND_BYTES`."""
        place = place_bytes(pool_bytes, large_page_bytes)
        home_bytes = -(-pool_bytes // CHUNK_BYTES) * CHUNK_BYTES
        count = min(most, MOST_BEYOND_BYTES // place)
        return place - home_bytes + count * place if count else 0

    def map(self, descriptor: int, pool_bytes: int) -> int:
        """Map a neighbour's pool; return the number of its first large page.

        :param descriptor: of the memfd that its pool is, of at least ``pool_bytes``; it stays the
            caller's.
        :raises TryLater: if no places are left, or the system refuses.
        """
        with self._lock:
            place = self._free_places(-(-pool_bytes // self._place_bytes))
            at_bytes = (1 + place) * self._place_bytes
            self._device.map_beyond(at_bytes, descriptor, pool_bytes)
            first = at_bytes // self._large_page_bytes
            self._take(place, pool_bytes, True)
            self._mapped[first] = place, pool_bytes
            return first

    def unmap(self, first_large: int) -> None:
        """Forget a neighbour; nothing may read its pages any more.

        :raises ValueError: if no neighbour begins there.
        """
        with self._lock:
            if first_large not in self._mapped:
                raise ValueError(f"no neighbour's pool begins at large page {first_large}")
            place, pool_bytes = self._mapped.pop(first_large)
            if self._device.unmap_beyond(first_large * self._large_page_bytes, pool_bytes):
                self._take(place, pool_bytes, False)

    def _free_places(self, count: int) -> int:
        for first in range(len(self._is_taken) - count + 1):
            if not any(self._is_taken[first : first + count]):
                return first
        raise TryLater("device: no addresses left for a neighbour's pool")

    def _take(self, place: int, pool_bytes: int, taken: bool) -> None:
        count = -(-pool_bytes // self._place_bytes)
        self._is_taken[place : place + count] = [taken] * count
