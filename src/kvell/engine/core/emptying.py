"""Empty the prefix cache, and the whole memory core after an exception at an unknown place."""

from collections.abc import Iterable

import numpy as np

from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.requests.plan import StepPlan
from kvell.memory import MemoryCore, audit
from kvell.vocabulary import StepNumber

NO_TEXT_ROOT = "\0nothing"
"""Root of the holder that only makes room; nothing is ever cached under it."""


def reset_prefix_cache(memory: MemoryCore, scheduler: Scheduler, step: StepNumber) -> None:
    """Evict all that is cached, in the CPU buffer too; pages that requests use stay.

    :param step: the step that was planned last.
    """
    scheduler.drop_reserves()
    _evict_unused(memory, step)


def abandon(
    memory: MemoryCore, scheduler: Scheduler, plans: Iterable[StepPlan], step: StepNumber
) -> None:
    """Forget all requests and the cache, whatever state an exception has left them in.

    Nothing that the pool holds is trusted: a step may have been interrupted before it copied or
    computed what its plan says.

    :param plans: those in flight, of which a runner may have seen nothing.
    :raises RuntimeError: if the audit is not clean then.
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
