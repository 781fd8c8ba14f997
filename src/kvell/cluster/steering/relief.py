"""Moves of whole requests from an instance that is short of memory to one that is not.

The alternative is preemption, after which requests are computed again.  Source: Llumnix §4.4.  If
no instance has room for a whole request, parts of requests move
(:mod:`kvell.cluster.steering.lending`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Relief = Literal["all", "loans", "reactive", "requests", "none"]
"""The moves between instances while memory is short: whole requests and loans of memory; only
loans; only loans to an instance whose running requests have hardly any memory left
(Infinite-LLM's figure 5b); only whole requests; none, so that requests are preempted."""
DEFAULT_RELIEF: Relief = "all"
SHORT_PART = 8
"""An instance is short of memory if requests wait there, or less than one byte in 8 is free."""
ROOM_PART = 4
"""An instance takes requests of others if none waits there, and one byte in 4 stays free."""


class MemoryPressure(Protocol):
    """An instance's memory, by its last heartbeat, and the moves from and to it."""

    @property
    def instance_id(self) -> str:
        """Name of the instance."""
        ...

    @property
    def waiting(self) -> int:
        """Number of requests that hold no pages there."""
        ...

    @property
    def memory_waiting(self) -> int:
        """Number of those that wait for memory, not for a seat or their turn."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free KV memory."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool."""
        ...

    @property
    def num_leaving(self) -> int:
        """Number of requests that are moving away."""
        ...

    @property
    def num_coming(self) -> int:
        """Number of requests that are moving there."""
        ...


@dataclass(frozen=True, slots=True)
class MovableView:
    """A request that could leave: its prompt is computed, and it does not move already.

    :param size_bytes: upper bound of its pages.
    """

    request_id: str
    size_bytes: int


def is_short(memory: MemoryPressure) -> bool:
    """Return whether an instance is short of memory; called for every heartbeat."""
    return memory.waiting > 0 or memory.free_bytes * SHORT_PART < memory.pool_bytes


def relief(
    source: MemoryPressure, others: Iterable[MemoryPressure], movable: Sequence[MovableView]
) -> tuple[str, str] | None:
    """Return a request that should leave ``source``, and the instance it should go to; or None.

    Requests leave one at a time, since its memory is out of date afterwards.  The youngest request
    that fits leaves, because it would be preempted first.  Afterwards the target must have more
    free memory than the source.

    :param movable: requests of the source, the oldest first.
    """
    if not is_short(source) or source.num_leaving or len(movable) < 2:
        return None
    rested = [other for other in others if not other.waiting and not other.num_coming]
    target = max(rested, key=lambda other: other.free_bytes, default=None)
    if target is None:
        return None
    for request in reversed(movable):
        left_bytes = target.free_bytes - request.size_bytes
        has_room = left_bytes * ROOM_PART >= target.pool_bytes
        if has_room and left_bytes > source.free_bytes + request.size_bytes:
            return request.request_id, target.instance_id
    return None
