"""From prompts to their vectors, over a front."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.pooling import POOLED
from kvell.errors import InstanceDied, RequestFailed, TryLater
from kvell.front.front import Front
from kvell.server.text.text_model import PreparedPrompt
from kvell.server.text.text_stream import raise_unless_done

MOST_AT_ONCE = 128
"""Prompts of one client that are with the front at once: a long list leaves room in the line."""


async def embedded(front: Front, prompt: PreparedPrompt) -> Finished:
    """Get the vector of a prompt, which comes with its end; being cancelled cancels the request.

    :raises TryLater: when there is no room or no instance just now.
    :raises RequestRefused: when the instance can never serve it.
    :raises RequestFailed: when the instances that computed it died, or somebody stopped it.
    """
    outputs = front.generate(
        prompt.token_ids,
        POOLED,
        request_id=prompt.request_id,
        cache_salt=prompt.cache_salt,
        model=prompt.model,
        session=prompt.session,
        priority=prompt.priority,
        trace=prompt.trace,
        tenant=prompt.tenant,
        group=prompt.group,
        pooling="last",
    )
    async with aclosing(outputs):
        async for output in outputs:
            if output.finished is not None:
                raise_unless_done(output.finished)
                if output.finished.embedding:
                    return output.finished
    raise RequestFailed("the request was stopped before it had a vector")


async def all_embedded(front: Front, prompts: Sequence[PreparedPrompt]) -> list[Finished]:
    """Get the vectors of prompts, in their order; the first failure cancels the others.

    As many are asked for at once as the front has room for.  If others take that room meanwhile,
    fewer are, so a long list fails for want of room only if there is none at all.
    """
    found: dict[int, Finished] = {}
    left = deque(enumerate(prompts))
    working = max(1, min(MOST_AT_ONCE, len(prompts), front.room))

    async def work() -> None:
        nonlocal working
        try:
            while left:
                index, prompt = left.popleft()
                found[index] = await embedded(front, prompt)
        except TryLater as error:
            if working == 1 or isinstance(error, InstanceDied):
                raise
            left.appendleft((index, prompt))  # for another, which goes on
        finally:
            working -= 1

    workers = [asyncio.create_task(work()) for _ in range(working)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(prompts))]
