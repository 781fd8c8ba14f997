"""Which running requests of an instance have most sections that could lie elsewhere.

What the rManager's heartbeat says of requests that lie at one instance alone (Infinite-LLM §6.2).
"""

import heapq
from collections.abc import Sequence

from kvell.engine.lending.borrowed import Borrowed
from kvell.engine.lending.sections import local_reason
from kvell.engine.protocol.messages import MOST_LONGEST
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.requests.request import Request
from kvell.memory import Layout


def longest(
    borrowed: Borrowed, running: Sequence[Request], layout: Layout
) -> tuple[RequestPlacementEntry, ...]:
    """Return at most ``MOST_LONGEST`` requests, the one with most such sections first.

    Those that came with a placement are not among them: it says where they lie.

    :param layout: of the pool.
    """
    lendable = {
        model: not local_reason(model, layout.groups) for model in {one.model for one in running}
    }
    counts = (
        (-_sections(borrowed, one), one.request_id)
        for one in running
        if lendable[one.model] and one.finish_reason is None
    )
    most = heapq.nsmallest(MOST_LONGEST, (one for one in counts if one[0] < 0))
    at = borrowed.sections.instance
    return tuple(RequestPlacementEntry(name, at, -count, local=True) for count, name in most)


def _sections(borrowed: Borrowed, request: Request) -> int:
    """Whole sections that are here, may go, and do not yet; the last one stays."""
    asked = borrowed.sections_asked(request)
    if asked is None:
        return 0
    settled = min(request.settled, request.num_tokens - 1)
    return settled // borrowed.section_tokens - asked
