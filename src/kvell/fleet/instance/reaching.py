"""Connection attempts: pauses between them, and the cleanup of abandoned ones."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0

Reached = TypeVar("Reached")


class Pauses:
    """Pauses between attempts: none before the first, then growing ones up to a bound."""

    def __init__(self) -> None:
        self._next_seconds = 0.0

    def next_seconds(self) -> float:
        pause = self._next_seconds
        self._next_seconds = min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause))
        return pause

    def reset(self) -> None:
        self._next_seconds = 0.0


async def reach(
    dialing: Coroutine[Any, Any, Reached], hang_up: Callable[[Reached], None]
) -> Reached:
    """Await a connection attempt.  If the caller is cancelled, the connection is closed once it is
    established.

    :raises OSError, ProtocolError: as of the attempt.
    """
    task = asyncio.create_task(dialing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        hang_up_after(task, hang_up)
        raise


def hang_up_after(task: "asyncio.Future[Reached]", hang_up: Callable[[Reached], None]) -> None:
    """Close the connection that an attempt establishes, once it does."""

    def drop(done: "asyncio.Future[Reached]") -> None:
        if not done.cancelled() and done.exception() is None:
            hang_up(done.result())

    task.add_done_callback(drop)
