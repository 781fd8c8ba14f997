"""Requests that go through a front again and again, each with an answer that is known before."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething, TryLater
from kvell.front.front import Front
from kvell.testing.instance import REFUSE_TOKEN, fake_token
from tests.async_engine.jobs import Job
from tests.engine.works import spec_of

PAUSE_SECONDS = 0.01
"""After a request that was not let in."""


@dataclass(frozen=True)
class Request:
    """A request of a load.

    :param token_at: the right token at a place of the answer, which has ``max_tokens``.
    """

    prompt: NDArray[np.int32]
    sampling: SamplingParams
    token_at: Callable[[int], int]


Draw = Callable[[Random], Request]


def fake_requests(least_tokens: int = 20, most_tokens: int = 250) -> Draw:
    """Requests that fake instances answer, with answers of about this length."""

    def draw(chance: Random) -> Request:
        low, high = REFUSE_TOKEN + 1, 256
        count = chance.randint(2, 8)
        prompt = np.array([chance.randrange(low, high) for _ in range(count)], "<i4")
        sampling = SamplingParams(max_tokens=chance.randint(least_tokens, most_tokens))
        return Request(prompt, sampling, partial(fake_token, prompt.tobytes()))

    return draw


FAKE_REQUESTS = fake_requests()


def known_requests(jobs: Sequence[Job]) -> Draw:
    requests = [
        Request(np.array(job.prompt, "<i4"), job.sampling, job.tokens.__getitem__) for job in jobs
    ]
    return lambda chance: chance.choice(requests)


class Load:
    """``async with Load(front, "7", 4) as load``: streams until the end, or until :meth:`stop`.

    :param streams: requests at once.
    :param draw: the next request of a stream.
    :ivar ends: how requests ended that were let in.
    :ivar refusals: what those were told that did not get their whole answer.
    :ivar turned_away: what those were told that were not let in.
    :ivar wrong: what no request may get.
    :ivar again: of those that were let in, how many went to another attempt.
    :ivar tokens: that came so far.
    """

    def __init__(self, front: Front, seed: str, streams: int, draw: Draw = FAKE_REQUESTS) -> None:
        self._front, self._seed, self._streams = front, seed, streams
        self._draw = draw
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
            await self._ask(self._draw(chance))

    async def _ask(self, request: Request) -> None:
        tokens: list[int] = []
        end: Finished | None = None
        try:
            async for output in self._front.generate(spec_of(request.prompt, request.sampling)):
                self.tokens += len(output.token_ids)
                for token in output.token_ids:
                    if token != request.token_at(len(tokens)):
                        self.wrong.append(f"token {len(tokens)} of {request.prompt}: {token}")
                    tokens.append(token)
                end = output.finished
        except (ChangeSomething, TryLater) as error:
            self.turned_away[_kind(str(error))] += 1
            if tokens:
                self.wrong.append(f"{error} after {len(tokens)} tokens")
            await asyncio.sleep(PAUSE_SECONDS)
            return
        self._judge(request.sampling.max_tokens, len(tokens), end)

    def _judge(self, most: int | None, tokens: int, end: Finished | None) -> None:
        self.accepted += 1
        if end is None:
            self.wrong.append("a request ended without an end")
            return
        self.ends[end.reason] += 1
        self.again += end.attempt > 0
        if end.reason == "length":
            if (tokens, end.output_tokens) != (most, most):
                self.wrong.append(f"{tokens} tokens, not {most}: {end}")
        elif end.reason in ("error", "refused") and end.message:
            self.refusals[_kind(end.message)] += 1
        else:
            self.wrong.append(str(end))


def unexplained(told: Iterable[str], reasons: Sequence[str]) -> list[str]:
    return [why for why in told if not any(part in why for part in reasons)]


def _kind(message: str) -> str:
    """What is said, without the numbers in it."""
    return "".join("#" if one.isdigit() else one for one in message)
