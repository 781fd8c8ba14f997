"""The audit of a core's part in the pool: remote sections, and a quiet part."""

from collections.abc import Iterator

from kvell.engine.lending.borrowing_requests import BorrowingRequests
from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.moving.handovers import Handovers


def audit_borrowed(borrowed: BorrowingRequests) -> list[str]:
    """Return all contradictions in remote sections, one sentence each."""
    each = (*borrowed.joining.values(), *borrowed.borrowers.values())
    return [p for borrower in each for p in _problems(borrower, borrowed.section_tokens)]


def _problems(borrower: DistributedRequest, section_tokens: int) -> Iterator[str]:
    request = borrower.request
    name = request.request_id
    if borrower.away * section_tokens != request.remote_tokens:
        yield f"{name}: {request.remote_tokens} tokens are remote"
    if not borrower.away <= borrower.filled <= len(borrower.sections):
        yield f"{name}: {borrower.away} remote sections of {borrower.filled} filled"
    if borrower.away * section_tokens >= max(1, request.num_tokens):
        yield f"{name}: its last section is remote"
    for section in borrower.sections:
        if section.successor is not None and not section.is_recalled:
            yield f"{name}: {section.loan} has a successor and is not recalled"


def audit_quiet(part: Handovers) -> list[str]:
    """Return what a step would miss that skips the calls of a quiet part, a sentence each."""
    if not part.is_quiet:
        return []
    missed = {
        "a deadline": part.next_deadline is not None,
        "requests that are idle": part.num_idle > 0,
        "pages that are held": part.holds_pages,
        "a need of a fence": part.wants_fence,
        "requests that were given up": bool(part.borrowed.placed.take_given_up()),
        "copies of sections": part.agent.lending.is_filling or part.agent.borrowing.is_filling,
        "pages that are lent": len(part.lent_pages()) > 0,
    }
    return [f"the part is quiet, and has {what}" for what, has in missed.items() if has]
