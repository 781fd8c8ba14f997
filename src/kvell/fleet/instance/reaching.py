"""How others are reached over the network: with pauses, and leaving nothing open."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0

Reached = TypeVar("Reached")


class Pauses:
    """Between attempts: none before the first, then longer and longer ones up to a bound."""

    def __init__(self) -> None:
        self._next_seconds = 0.0

    def next_seconds(self) -> float:
        """How long to wait before the next attempt."""
        pause = self._next_seconds
        self._next_seconds = min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause))
        return pause

    def reset(self) -> None:
        """An attempt was worth it."""
        self._next_seconds = 0.0


async def reached(
    dialing: Coroutine[Any, Any, Reached], hang_up: Callable[[Reached], None]
) -> Reached:
    """What is dialed.  A dial cannot be stopped: if nobody waits for it any more, what it reaches
    is hung up.

    :raises OSError, ProtocolError: as of the dial.
    """
    task = asyncio.create_task(dialing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        hang_up_after(task, hang_up)
        raise


def hang_up_after(task: "asyncio.Future[Reached]", hang_up: Callable[[Reached], None]) -> None:
    """Hang up on what a task reaches, if it still does."""

    def drop(done: "asyncio.Future[Reached]") -> None:
        if not done.cancelled() and done.exception() is None:
            hang_up(done.result())

    task.add_done_callback(drop)
