"""The memory that an instance's requests need beyond what they have, for the planner of loans.

Pure; every heartbeat reports it.
"""

from typing import NamedTuple

from kvell.engine.lending.sections import full_groups
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.requests.request import Request
from kvell.memory import Layout, pages_of_text


class MemoryDemand(NamedTuple):
    """The demand for memory, by the latest plan; the fields of :class:`.LoadStats`."""

    memory_waiting: int
    head_tokens: int
    head_bytes: int
    answer_tokens: int
    growth_bytes: int


class _Growth(NamedTuple):
    """The growth of one running request.

    :param steps: output tokens until its end.
    :param prompt_bytes: of the tokens that it has, but has not computed.
    :param token_bytes: of each further token.
    :param held_bytes: of the computed tokens, which its end frees.
    """

    steps: int
    prompt_bytes: int
    token_bytes: int
    held_bytes: int


def memory_demand(scheduler: Scheduler, layout: Layout) -> MemoryDemand:
    """Return the memory that waiting requests wait for, and that running ones will need."""
    head = scheduler.waiting.first()
    return MemoryDemand(
        scheduler.num_awaiting_memory,
        0 if head is None else head.num_tokens,
        0 if head is None else _admission_bytes(head, layout),
        0 if head is None else scheduler.expected_output(head),
        growth_bytes(scheduler, layout),
    )


def growth_bytes(scheduler: Scheduler, layout: Layout) -> int:
    """Return the most by which the memory of all running requests together will grow.

    Each computes the rest of its prompt, and then a token a step; when one ends, its memory serves
    the others.
    """
    rates = {
        model: _token_bytes(model, layout)
        for model in {request.model for request in scheduler.running}
    }
    growths = sorted(_growth(scheduler, r, rates[r.model]) for r in scheduler.running)
    growing_bytes = sum(growth.prompt_bytes for growth in growths)
    rate = sum(growth.token_bytes for growth in growths)
    most_bytes = freed_bytes = 0
    for growth in growths:
        most_bytes = max(most_bytes, growing_bytes + rate * growth.steps - freed_bytes)
        growing_bytes -= growth.prompt_bytes
        rate -= growth.token_bytes
        freed_bytes += growth.held_bytes
    return most_bytes


def _growth(scheduler: Scheduler, request: Request, token_bytes: int) -> _Growth:
    """Return a running request's growth; one with a placement has room here for all that stays."""
    prompt_tokens = max(0, request.end_for_now - request.computed)
    steps = 0 if request.local_tokens else scheduler.expected_output(request)
    held_tokens = max(0, request.computed - request.remote_tokens)
    return _Growth(steps, prompt_tokens * token_bytes, token_bytes, held_tokens * token_bytes)


def _token_bytes(model: str, layout: Layout) -> int:
    groups = full_groups(model, layout.groups)
    return sum(group.page_stride_bytes // group.page_tokens for _, group in groups)


def _admission_bytes(request: Request, layout: Layout) -> int:
    """Return the memory that a waiting request needs to be admitted: of all its tokens here."""
    tokens = max(1, request.end_for_now - request.remote_tokens)
    pages = pages_of_text(layout, tokens, request.model)[:, 1].tolist()
    return sum(
        count * group.page_stride_bytes for count, group in zip(pages, layout.groups, strict=True)
    )
