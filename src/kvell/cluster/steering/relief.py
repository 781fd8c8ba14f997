"""Which request leaves an instance that is short of memory for one that is not.

The alternative is that the instance preempts requests and computes them again.  Source: Llumnix
§4.4.  Where none has room elsewhere as a whole, parts of requests go
(:mod:`kvell.cluster.steering.lending`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHORT_PART = 8
"""An instance is short of memory if requests wait there, or less than one byte in 8 is free."""
ROOM_PART = 4
"""One takes requests of others if none waits there, and one byte in 4 stays free afterwards."""


@dataclass(frozen=True, slots=True)
class MemoryView:
    """An instance's memory as it said last.

    :param waiting: requests that hold no pages there.
    :param leaving: requests that are on their way from it, and ``coming`` to it.
    """

    instance_id: str
    waiting: int
    free_bytes: int
    pool_bytes: int
    leaving: int = 0
    coming: int = 0

    @property
    def is_short(self) -> bool:
        """Whether requests should leave it."""
        return is_short(self.waiting, self.free_bytes, self.pool_bytes)


@dataclass(frozen=True, slots=True)
class MovableView:
    """A request that could leave: its prompt is computed, and it stays otherwise.

    :param size_bytes: of its pages, at most.
    """

    request_id: str
    size_bytes: int


def is_short(waiting: int, free_bytes: int, pool_bytes: int) -> bool:
    """Whether an instance is short of memory; asked with every heartbeat before views are made."""
    return waiting > 0 or free_bytes * SHORT_PART < pool_bytes


def relief(
    source: MemoryView, others: Iterable[MemoryView], movable: Sequence[MovableView]
) -> tuple[str, str] | None:
    """Return a request that should leave ``source``, and the instance it should go to; or None.

    One at a time: what it said of its memory is old by then.  The youngest goes, which would be
    preempted first, if the other instance has more memory left afterwards than this one.

    :param movable: the oldest first.
    """
    if not source.is_short or source.leaving or len(movable) < 2:
        return None
    rested = [one for one in others if not one.waiting and not one.coming]
    target = max(rested, key=lambda one: one.free_bytes, default=None)
    if target is None:
        return None
    for one in reversed(movable):
        left_bytes = target.free_bytes - one.size_bytes
        has_room = left_bytes * ROOM_PART >= target.pool_bytes
        if has_room and left_bytes > source.free_bytes + one.size_bytes:
            return one.request_id, target.instance_id
    return None
