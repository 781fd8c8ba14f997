"""Who gives way: for want of memory, and to a tenant that holds less than another; pure."""

from collections import Counter
from collections.abc import Sequence

from kvell.engine.requests.request import Request

PROMPT_TOKENS_PER_MADE = 8
"""Tokens of a prompt that take no longer than a token that is made, or not by much."""


def gives_way(running: Sequence[Request]) -> Request:
    """The youngest request of the tenant that holds most tokens.

    The oldest of all gives way last, so that one at least always comes to its end; and so do those
    that borrow memory (Infinite-LLM: what is lent would be computed anew).
    """
    own = [one for one in running if not one.borrows]
    if not own:
        return running[-1]
    held = _held_tokens(running)
    young = [one for one in own if one is not running[0]] or own
    return _youngest_of_largest(young, held)


def makes_way(head: Request, running: Sequence[Request], *, for_seat: bool) -> Request | None:
    """The request that makes way for one that waits; None if it waits for its turn.

    Its tenant holds more than the waiting one's would then, of seats or of tokens: so the two come
    to have as much, and none takes back what it gave.  It is no more urgent, and has made enough
    since it was let in to have been worth its start.
    """
    held = Counter(one.turn.tenant for one in running) if for_seat else _held_tokens(running)
    then = held[head.turn.tenant] + (1 if for_seat else head.num_tokens)
    fit = [
        one
        for one in running
        if held[one.turn.tenant] > then
        and one.turn.priority >= head.turn.priority
        and not one.borrows
        and _was_worth_its_start(one)
    ]
    return _youngest_of_largest(fit, held) if fit else None


def _was_worth_its_start(request: Request) -> bool:
    """Whether a request has made as much as took the time of computing what it began with."""
    made = request.num_output - request.entered_output
    return made > 0 and PROMPT_TOKENS_PER_MADE * made >= request.entered_tokens


def _youngest_of_largest(requests: Sequence[Request], held: Counter[str]) -> Request:
    """The last one among the requests of the tenant that holds most."""
    return max(enumerate(requests), key=lambda one: (held[one[1].turn.tenant], one[0]))[1]


def _held_tokens(running: Sequence[Request]) -> Counter[str]:
    held: Counter[str] = Counter()
    for one in running:
        held[one.turn.tenant] += one.num_tokens
    return held
