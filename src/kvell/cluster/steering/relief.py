"""Moves of whole requests from an instance that is short of memory to one that is not.

The alternative is preemption, after which requests are computed again.  Source: Llumnix §4.4.  If
no instance has room for a whole request, parts of requests move
(:mod:`kvell.cluster.steering.lending`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHORT_PART = 8
"""An instance is short of memory if requests wait there, or less than one byte in 8 is free."""
ROOM_PART = 4
"""An instance takes requests of others if none waits there, and one byte in 4 stays free."""


@dataclass(frozen=True, slots=True)
class MemoryView:
    """An instance's memory, by its last heartbeat.

    :param waiting: requests that hold no pages there.
    :param leaving: requests that are moving away, and ``coming`` those that are moving there.
    """

    instance_id: str
    waiting: int
    free_bytes: int
    pool_bytes: int
    leaving: int = 0
    coming: int = 0

    @property
    def is_short(self) -> bool:
        """Whether requests should leave the instance."""
        return is_short(self.waiting, self.free_bytes, self.pool_bytes)


@dataclass(frozen=True, slots=True)
class MovableView:
    """A request that could leave: its prompt is computed, and it does not move already.

    :param size_bytes: upper bound of its pages.
    """

    request_id: str
    size_bytes: int


def is_short(waiting: int, free_bytes: int, pool_bytes: int) -> bool:
    """Return whether memory is short; called for every heartbeat, before views are made."""
    return waiting > 0 or free_bytes * SHORT_PART < pool_bytes


def relief(
    source: MemoryView, others: Iterable[MemoryView], movable: Sequence[MovableView]
) -> tuple[str, str] | None:
    """Return a request that should leave ``source``, and the instance it should go to; or None.

    Requests leave one at a time, since the view is out of date afterwards.  The youngest request
    that fits leaves, because it would be preempted first.  Afterwards the target must have more
    free memory than the source.

    :param movable: requests of the source, the oldest first.
    """
    if not source.is_short or source.leaving or len(movable) < 2:
        return None
    rested = [view for view in others if not view.waiting and not view.coming]
    target = max(rested, key=lambda view: view.free_bytes, default=None)
    if target is None:
        return None
    for request in reversed(movable):
        left_bytes = target.free_bytes - request.size_bytes
        has_room = left_bytes * ROOM_PART >= target.pool_bytes
        if has_room and left_bytes > source.free_bytes + request.size_bytes:
            return request.request_id, target.instance_id
    return None
