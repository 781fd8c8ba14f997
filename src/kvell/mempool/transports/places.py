"""Places behind one's own pool, where pools of neighbours are mapped; without I/O.

::

    own pool                 neighbour A                 neighbour B
    |L0|L1|L2| … |Ln-1| … |Ln|Ln+1| …            |Lm|Lm+1| …
    └ addresses of one reserved range; every large page at a multiple of its size ┘
"""

import math

from kvell.device.host import CHUNK_BYTES
from kvell.errors import TryLater

MOST_NEIGHBOURS = 64
"""Places of an instance that is one of several of its host."""
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


def num_places(pool_bytes: int, large_page_bytes: int, most: int = MOST_NEIGHBOURS) -> int:
    """Return the places to reserve behind a pool for neighbours like it: ``most``, or fewer where
    those take more than :data:`MOST_BEYOND_BYTES`."""
    return min(most, MOST_BEYOND_BYTES // place_bytes(pool_bytes, large_page_bytes))


class Places:
    """Which places are taken.  The first begins as far behind the pool's beginning as it is long.

    :param pool_bytes: of one's own pool.
    :param count: places, each for a pool as large as one's own.
    """

    def __init__(self, pool_bytes: int, large_page_bytes: int, count: int) -> None:
        self._large_page_bytes = large_page_bytes
        self._place_bytes = place_bytes(pool_bytes, large_page_bytes)
        self._is_taken = [False] * count

    def __len__(self) -> int:
        return len(self._is_taken)

    def first_free(self, pool_bytes: int) -> int:
        """Return the first large page of free places in which a pool can lie.

        :raises TryLater: if no places are left.
        """
        count = self._count(pool_bytes)
        for place in range(len(self._is_taken) - count + 1):
            if not any(self._is_taken[place : place + count]):
                return (1 + place) * self._place_bytes // self._large_page_bytes
        raise TryLater("device: no addresses left for a neighbour's pool")

    def set_taken(self, first_large: int, pool_bytes: int, taken: bool) -> None:
        """Say whether the places of a pool that begins at a large page are taken."""
        count = self._count(pool_bytes)
        place = first_large * self._large_page_bytes // self._place_bytes - 1
        self._is_taken[place : place + count] = [taken] * count

    def _count(self, pool_bytes: int) -> int:
        return -(-pool_bytes // self._place_bytes)
