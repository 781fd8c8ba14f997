"""Choice of the request to preempt, for memory or for a tenant that holds less; pure."""

from collections import Counter
from collections.abc import Sequence

from kvell.engine.requests.request import Request

PROMPT_TOKENS_PER_MADE = 8
"""Number of prompt tokens that take about as long as one output token."""


def gives_way(running: Sequence[Request]) -> Request:
    """Return the request to preempt: the youngest one of the tenant that holds most tokens.

    The oldest request is preempted last, so that at least one always finishes.  So are requests
    that borrow memory (Infinite-LLM: their remote sections would be recomputed).
    """
    local = [request for request in running if not request.borrows]
    if not local:
        return running[-1]
    held = _held_tokens(running)
    young = [request for request in local if request is not running[0]] or local
    return _youngest_of_largest(young, held)


def makes_way(head: Request, running: Sequence[Request], *, for_seat: bool) -> Request | None:
    """Return the request to preempt for the waiting request ``head``; None if ``head`` must wait.

    The tenant of the preempted request holds more seats or tokens than the tenant of ``head`` would
    then: so both come to hold the same, and neither takes back what it gave.  The request is not
    more urgent, and has made enough since its admission to have been worth its start.  The last
    does not matter if the tenant of ``head`` holds nothing: a long prompt would keep it out for as
    long as it takes.  Only the oldest request may finish its prompt then, so that one always does.
    """
    held = Counter(r.turn.tenant for r in running) if for_seat else _held_tokens(running)
    is_newcomer = not held[head.turn.tenant]
    then = held[head.turn.tenant] + (1 if for_seat else head.num_tokens)
    fit = [
        request
        for request in running
        if held[request.turn.tenant] > then
        and request.turn.priority >= head.turn.priority
        and not request.borrows
        and (_was_worth_its_start(request) or (is_newcomer and request is not running[0]))
    ]
    return _youngest_of_largest(fit, held) if fit else None


def _was_worth_its_start(request: Request) -> bool:
    """Return whether a request's output took at least as long as the tokens computed before it."""
    made = request.num_output - request.entered_output
    return made > 0 and PROMPT_TOKENS_PER_MADE * made >= request.entered_tokens


def _youngest_of_largest(requests: Sequence[Request], held: Counter[str]) -> Request:
    return max(enumerate(requests), key=lambda item: (held[item[1].turn.tenant], item[0]))[1]


def _held_tokens(running: Sequence[Request]) -> Counter[str]:
    held: Counter[str] = Counter()
    for request in running:
        held[request.turn.tenant] += request.num_tokens
    return held
