"""Many requests of one client side by side, as many at once as the front has room for."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvell.errors import InstanceDied, TryLater
from kvell.front.front import Front

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_AT_ONCE = 128
"""Prompts of one client that are with the front at once: a long list leaves room in the line."""


async def all_served(
    front: Front, items: Sequence[Item], serve: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Serve items, each by a request of its own; return results in their order.

    The first failure cancels the others.  As many are asked for at once as the front has room for.
    If others take that room meanwhile, fewer are, so a long list fails for want of room only if
    there is none at all.
    """
    found: dict[int, Result] = {}
    left = deque(enumerate(items))
    working = max(1, min(MOST_AT_ONCE, len(items), front.room))

    async def work() -> None:
        nonlocal working
        try:
            while left:
                index, item = left.popleft()
                found[index] = await serve(item)
        except TryLater as error:
            if working == 1 or isinstance(error, InstanceDied):
                raise
            left.appendleft((index, item))  # for another, which goes on
        finally:
            working -= 1

    workers = [asyncio.create_task(work()) for _ in range(working)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(items))]
