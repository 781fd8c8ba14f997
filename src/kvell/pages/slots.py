"""The slots of logical large pages: the one table that changes when bytes move.

Tables, index and plans name logical pages; only code that touches bytes asks for slots. A move is
one copy and one exchange here.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class SlotTable:
    """Logical large page → slot, a permutation; the identity until a page moves.

    :param num_large_pages: size of the pool in large pages.
    """

    def __init__(self, num_large_pages: int) -> None:
        self._slots = np.arange(num_large_pages, dtype=np.int32)
        self._moved = False

    def physical(self, page_ids: Ints, pages_per_large: int) -> Ints:
        """Convert logical page ids to physical ones (slot × pages_per_large + index), int32."""
        if not self._moved:
            return page_ids
        large, index = np.divmod(page_ids, np.int32(pages_per_large))
        return self._slots[large] * np.int32(pages_per_large) + index

    @property
    def moved(self) -> Ints | None:
        """Slots by logical large page; None until a page moves."""
        return self._slots if self._moved else None

    def exchange(self, first: int, second: int) -> None:
        """Record that the bytes of two logical large pages have changed places."""
        slots = self._slots
        slots[first], slots[second] = slots[second].copy(), slots[first].copy()
        self._moved = True
