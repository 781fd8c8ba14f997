"""Requests that go through a front again and again, each with an answer that is known before."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import InstanceDied, TryLater
from kvell.front.front import Front
from kvell.testing.instance import REFUSE_TOKEN, fake_token
from tests.engine.works import spec_of

PAUSE_SECONDS = 0.01
"""After a request that was not let in."""


class Load:
    """``async with Load(front, seed=7) as load``: streams until the end, or until :meth:`stop`.

    :param streams: requests at once.
    :ivar ends: how requests ended that were let in.
    :ivar refusals: what those were told that did not get their whole answer.
    :ivar turned_away: what those were told that were not let in.
    :ivar wrong: what no request may get.
    :ivar again: of those that were let in, how many went to another attempt.
    :ivar tokens: that came so far.
    """

    def __init__(
        self, front: Front, seed: str, streams: int, least_tokens: int = 20, most_tokens: int = 250
    ) -> None:
        self._front, self._seed, self._streams = front, seed, streams
        self._tokens = least_tokens, most_tokens
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.ends = Counter[str]()
        self.refusals = Counter[str]()
        self.turned_away = Counter[str]()
        self.wrong: list[str] = []
        self.accepted = self.tokens = self.again = 0

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._stream(n)) for n in range(self._streams)]
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Begin no further request, and wait until all have ended."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def goes_on(self, tokens: int) -> None:
        """Wait until so many more tokens have come."""
        enough = self.tokens + tokens
        await self._until(lambda: self.tokens >= enough)

    async def ends_more(self, requests: int) -> None:
        """Wait until so many more requests have ended that were let in."""
        enough = self.accepted + requests
        await self._until(lambda: self.accepted >= enough)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)

    async def _stream(self, number: int) -> None:
        chance = Random(f"{self._seed} {number}")
        while not self._is_over:
            await self._request(chance)

    async def _request(self, chance: Random) -> None:
        low, high = REFUSE_TOKEN + 1, 256
        prompt = np.array([chance.randrange(low, high) for _ in range(chance.randint(2, 8))], "<i4")
        most = chance.randint(*self._tokens)
        tokens: list[int] = []
        end: Finished | None = None
        try:
            async for output in self._front.generate(
                spec_of(prompt, SamplingParams(max_tokens=most))
            ):
                self.tokens += len(output.token_ids)
                for token in output.token_ids:
                    if token != fake_token(prompt.tobytes(), len(tokens)):
                        self.wrong.append(f"token {len(tokens)} of {prompt}: {token}")
                    tokens.append(token)
                end = output.finished
        except (InstanceDied, TryLater) as error:
            self.turned_away[_kind(str(error))] += 1
            if tokens:
                self.wrong.append(f"{error} after {len(tokens)} tokens")
            await asyncio.sleep(PAUSE_SECONDS)
            return
        self._judge(most, len(tokens), end)

    def _judge(self, most: int, tokens: int, end: Finished | None) -> None:
        self.accepted += 1
        if end is None:
            self.wrong.append("a request ended without an end")
            return
        self.ends[end.reason] += 1
        self.again += end.attempt > 0
        if end.reason == "length":
            if (tokens, end.output_tokens) != (most, most):
                self.wrong.append(f"{tokens} tokens, not {most}: {end}")
        elif end.reason == "error" and end.message:
            self.refusals[_kind(end.message)] += 1
        else:
            self.wrong.append(str(end))


def _kind(message: str) -> str:
    """What is said, without the numbers in it."""
    return "".join("#" if one.isdigit() else one for one in message)
