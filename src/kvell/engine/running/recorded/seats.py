"""Seats on the device: the last token of each request, for the step that follows at once.

::

    step n     row of a request ─ draws ─► its seat
    step n+1   planned before the token is known ─ reads ─► its seat
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from kvell.engine.requests.plan import PENDING, TokenWork
from kvell.engine.running.batching import Ints
from kvell.models.captured.slots import NO_SEAT


class DeviceSeats:
    """The seats of one model's requests, the smallest free one first.

    :param count: seats on the device; a request without one has its tokens from the host.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._taken: dict[int, int] = {}

    def release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            seat = self._taken.pop(handle, None)
            if seat is not None:
                heappush(self._free, seat)

    def targets(self, work: Sequence[TokenWork]) -> Ints:
        """Return the seat of each row's token, int32; NO_SEAT where none is free."""
        for item in work:
            if item.handle not in self._taken and self._free:
                self._taken[item.handle] = heappop(self._free)
        return self._of(item.handle for item in work)

    def sources(self, work: Sequence[TokenWork]) -> Ints | None:
        """Return the seat of each row whose token the previous step draws, NO_SEAT for the others.

        None if such a row has no seat.
        """
        is_pending = np.array([item.token_ids.item(-1) == PENDING for item in work])
        seats = self._of(item.handle for item in work)
        if (is_pending & (seats == NO_SEAT)).any():
            return None
        return np.where(is_pending, seats, np.int32(NO_SEAT))

    def _of(self, handles: Iterable[int]) -> Ints:
        return np.array([self._taken.get(handle, NO_SEAT) for handle in handles], np.int32)
