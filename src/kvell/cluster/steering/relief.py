"""Moves of whole requests from an instance that is short of memory to one that is not.

The alternative is preemption, after which requests are computed again.  Source: Llumnix §4.4.  If
no instance has room for a whole request, parts of requests move
(:mod:`kvell.cluster.steering.lending`).
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from kvell.cluster.instance_load import InstanceLoad, Movable

Relief = Literal["all", "loans", "reactive", "requests", "none"]
"""The moves between instances while memory is short: whole requests and loans of memory; only
loans; only loans to an instance whose running requests have hardly any memory left
(Infinite-LLM's figure 5b); only whole requests; none, so that requests are preempted."""
DEFAULT_RELIEF: Relief = "all"
ROOM_PART = 4
"""An instance takes requests of others if none waits there, and one byte in 4 stays free."""


def relief(
    source: InstanceLoad, others: Iterable[InstanceLoad], movable: Sequence[Movable]
) -> tuple[str, str] | None:
    """Return a request that should leave ``source``, and the instance it should go to; or None.

    Requests leave one at a time, since its memory is out of date afterwards.  The youngest request
    that fits leaves, because it would be preempted first.  Afterwards the target must have more
    free memory than the source.

    :param movable: requests of the source, the oldest first.
    """
    if not source.is_short or source.num_leaving or len(movable) < 2:
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
