"""Emptying of the prefix cache, and of a memory core after an exception at an unknown place."""

from collections.abc import Iterable

import numpy as np

from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.requests.plan import StepPlan
from kvell.memory import MemoryCore, audit
from kvell.vocabulary import StepNumber

NO_TEXT_ROOT = "\0nothing"
"""Cache root of a holder that only evicts pages; nothing is ever cached under it."""


def reset_prefix_cache(memory: MemoryCore, scheduler: Scheduler, step: StepNumber) -> None:
    """Evict all cached pages, also in the CPU buffer; pages that requests use stay.

    :param step: the step that was planned last.
    """
    scheduler.drop_reserves()
    _evict_unused(memory, step)


def abandon(
    memory: MemoryCore, scheduler: Scheduler, plans: Iterable[StepPlan], step: StepNumber
) -> None:
    """Drop all requests and the cache, in whatever state an exception has left them.

    The pool's contents are not trusted: a step may have been interrupted before it copied or
    computed what its plan says.

    :param plans: the plans in flight, which the runner may not have seen.
    :raises RuntimeError: if the audit finds a problem afterwards.
    """
    released = [handle for plan in plans for handle in plan.released]
    scheduler.drop_reserves()
    scheduler.clear((*released, *_close_all(memory)))
    _evict_unused(memory, step)
    if problems := audit(memory.layout, memory.snapshot()):
        raise RuntimeError(problems[0])


def _evict_unused(memory: MemoryCore, step: StepNumber) -> None:
    model = memory.layout.groups[0].model
    no_text = np.zeros(1, np.int32)
    handle = memory.open(no_text, NO_TEXT_ROOT, step, reuse=False, model=model)
    memory.close(handle, renew=False)


def _close_all(memory: MemoryCore) -> tuple[int, ...]:
    handles = tuple(holder.handle for holder in memory.snapshot().holders)
    for handle in handles:
        memory.close(handle, renew=False)
    return handles
