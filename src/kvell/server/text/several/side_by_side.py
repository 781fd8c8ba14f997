"""Concurrent requests of one client, as many as the front has room for."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvell.errors import InstanceDied, TryLater
from kvell.front.front import Front

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_AT_ONCE = 128
"""The most concurrent requests of one client, which leaves room in the queue for other clients."""


async def all_served(
    front: Front, items: Sequence[Item], serve: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Serve each item by its own request; return the results in the order of the items.

    The first failure cancels the others.  At most as many requests run concurrently as the front
    has room for at the start.  A request that finds no room reduces their number and is retried,
    so a list fails for lack of room only if there is none at all.
    """
    results: dict[int, Result] = {}
    left = deque(enumerate(items))
    working = max(1, min(MOST_AT_ONCE, len(items), front.room))

    async def work() -> None:
        nonlocal working
        try:
            while left:
                index, item = left.popleft()
                results[index] = await serve(item)
        except TryLater as error:
            if working == 1 or isinstance(error, InstanceDied):
                raise
            left.appendleft((index, item))  # for another worker
        finally:
            working -= 1

    workers = [asyncio.create_task(work()) for _ in range(working)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[index] for index in range(len(items))]
