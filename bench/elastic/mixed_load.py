"""A load of requests of every length, to put a memory contract under stress.

Workers ask one request after the other (a closed loop: the server is never idle and never
flooded).  Prompts range from one token to the longest that the server serves; some share a prefix
with an earlier one, and some clients hang up midway.
"""

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvell.load.answers import AnswerReader
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import ConnectionFailed, RefusedResponse, Wire

FIRST_ID = 256
"""Ids below it may be special."""
TIMEOUT_SECONDS = 900.0
SHORTEST_SHARE = LONGEST_SHARE = 0.06
"""Shares of requests whose prompt has one token, and the longest length."""
REPEAT_SHARE = 0.25
HANG_UP_SHARE = 0.05
HANG_UP_PIECES = 2


@dataclass(frozen=True)
class Asked:
    """One request.

    :param hangs_up: pieces of the answer after which the client leaves; None: it waits for all.
    """

    prompt: list[int]
    output_tokens: int
    hangs_up: int | None = None


class Mix:
    """Draws requests from a seed.

    :param longest_tokens: of prompt and output together.
    :param most_output_tokens: of one answer.
    """

    def __init__(
        self, seed: int, longest_tokens: int, vocab_size: int, most_output_tokens: int = 96
    ) -> None:
        self._draw = np.random.default_rng(seed)
        self._longest_tokens, self._vocab_size = longest_tokens, vocab_size
        self._most_output_tokens = most_output_tokens
        self._before: list[int] = []

    def next(self) -> Asked:
        """Draw the next request."""
        count = self._prompt_tokens()
        room = self._longest_tokens - count
        output = self._log_uniform(min(room, self._most_output_tokens))
        hangs_up = HANG_UP_PIECES if self._draw.random() < HANG_UP_SHARE else None
        if output <= HANG_UP_PIECES:
            hangs_up = None
        return Asked(self._prompt(count), output, hangs_up)

    def _prompt_tokens(self) -> int:
        kind = self._draw.random()
        if kind < SHORTEST_SHARE:
            return 1
        if kind < SHORTEST_SHARE + LONGEST_SHARE:
            return self._longest_tokens - 1
        return self._log_uniform(self._longest_tokens - 1)

    def _log_uniform(self, most: int) -> int:
        """From 1 to ``most``, uniform on a logarithmic scale."""
        return min(most, int(np.exp(self._draw.uniform(0.0, np.log(most + 1)))))

    def _prompt(self, count: int) -> list[int]:
        """New tokens; now and then behind half of the prompt before."""
        shared = self._before[: count // 2] if self._draw.random() < REPEAT_SHARE else []
        own = self._draw.integers(FIRST_ID, self._vocab_size, count - len(shared))
        self._before = [*shared, *own.tolist()]
        return self._before


@dataclass
class Tally:
    """What became of the requests.

    :ivar failures: by reason; empty if every request had its whole answer.
    :ivar longest_prompt: of those that were answered.
    :ivar first_token_seconds: from sending, by prompt length.
    """

    completed: int = 0
    hung_up: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    shortest_prompt: int = 1 << 62
    longest_prompt: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_token_seconds: list[tuple[int, float]] = field(default_factory=list)

    def add(self, asked: Asked, reader: AnswerReader, sent_seconds: float) -> None:
        """Count a finished request, or the failure if its answer is not what it asked for."""
        problem = reader.problem()
        if problem is None and reader.output_tokens != asked.output_tokens:
            problem = f"{reader.output_tokens} tokens instead of {asked.output_tokens}"
        if problem is not None:
            self.failures[problem] += 1
            return
        count = len(asked.prompt)
        self.completed += 1
        self.prompt_tokens += count
        self.output_tokens += reader.output_tokens
        self.shortest_prompt = min(self.shortest_prompt, count)
        self.longest_prompt = max(self.longest_prompt, count)
        self.first_token_seconds.append((count, reader.content_seconds[0] - sent_seconds))


class MixedLoad:
    """Workers over one client.

    :param model: that requests name.
    """

    def __init__(self, client: HttpClient, model: str, mix: Mix) -> None:
        self.tally = Tally()
        self._client, self._wire, self._mix = client, Wire(model), mix

    async def run(self, workers: int, seconds: float) -> Tally:
        """Send requests for ``seconds``, then wait for those under way."""
        until_seconds = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._work(until_seconds))
        return self.tally

    async def ask(self, asked: Asked) -> None:
        """Send one request; read to its end, or until its client hangs up."""
        body = self._wire.body({"prompt": asked.prompt}, asked.output_tokens)
        reader, sent_seconds = AnswerReader(), asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                left = await self._listen(body, reader, asked.hangs_up)
        except (TimeoutError, ConnectionFailed, RefusedResponse) as error:
            self.tally.failures[str(error) or f"no answer within {TIMEOUT_SECONDS:g} s"] += 1
            return
        if left:
            self.tally.hung_up += 1
        else:
            self.tally.add(asked, reader, sent_seconds)

    async def _work(self, until_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_seconds:
            await self.ask(self._mix.next())

    async def _listen(self, body: bytes, reader: AnswerReader, pieces: int | None) -> bool:
        """Whether the client left after ``pieces`` pieces."""
        async with aclosing(self._client.stream_of(self._wire.path, body)) as stream:
            async for at_seconds, data in stream:
                reader.feed(at_seconds, data)
                heard = len(reader.content_seconds)
                if pieces is not None and heard >= pieces and not reader.has_ended:
                    return True
        return False


def figures(tally: Tally) -> dict[str, Any]:
    """The tally as plain data."""
    waits = sorted(seconds for _, seconds in tally.first_token_seconds)
    return {
        "completed": tally.completed,
        "hung_up": tally.hung_up,
        "prompt_tokens": tally.prompt_tokens,
        "output_tokens": tally.output_tokens,
        "shortest_prompt": tally.shortest_prompt,
        "longest_prompt": tally.longest_prompt,
        "failures": dict(tally.failures),
        "ttft_seconds_p50": waits[len(waits) // 2] if waits else None,
        "ttft_seconds_max": waits[-1] if waits else None,
    }
