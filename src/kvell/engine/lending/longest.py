"""The running requests of an instance with the most sections that could move to creditors.

The rManager reports them in its heartbeat (Infinite-LLM §6.2).
"""

import heapq
from collections.abc import Sequence

from kvell.engine.lending.borrowing_requests import BorrowingRequests
from kvell.engine.lending.sections import local_reason
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import MOST_LONGEST
from kvell.engine.requests.request import Request
from kvell.memory import Layout


def longest(
    borrowed: BorrowingRequests, running: Sequence[Request], layout: Layout
) -> tuple[RequestPlacementEntry, ...]:
    """Return at most ``MOST_LONGEST`` requests, the one with most such sections first.

    Requests with a placement are left out: it says where their sections are.
    """
    lendable = {
        model: not local_reason(model, layout.groups)
        for model in {request.model for request in running}
    }
    counts = (
        (-_sections(borrowed, request), request.request_id)
        for request in running
        if lendable[request.model] and request.finish_reason is None
    )
    entries = heapq.nsmallest(MOST_LONGEST, (entry for entry in counts if entry[0] < 0))
    at = borrowed.sections.instance
    return tuple(RequestPlacementEntry(name, at, -count, local=True) for count, name in entries)


def _sections(borrowed: BorrowingRequests, request: Request) -> int:
    """Return the number of whole local sections that may leave; the last one stays."""
    num_asked = borrowed.sections_asked(request)
    if num_asked is None:
        return 0
    settled = min(request.settled, request.num_tokens - 1)
    return settled // borrowed.section_tokens - num_asked
