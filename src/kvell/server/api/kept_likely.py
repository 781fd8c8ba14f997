"""Log probabilities that an answer keeps until it is sent: bounded, and charged to its tenant."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.equal_parts import EqualParts
from kvell.errors import ChangeSomething
from kvell.server.access.visit import RequestContext
from kvell.server.text.lanes import TOLD_BYTES
from kvell.server.text.text_stream import TextDelta

EXPECTED_TOKENS = 512
"""Tokens of an answer to reserve memory for: at first, and in each later step."""
BYTES_PER_NUMBER = 16
"""Bytes of a token and its probability in :class:`.KeptLogprobs`, with room to grow."""
MOST_NUMBERS = TOLD_BYTES // BYTES_PER_NUMBER
"""Log probabilities that one request may ask for."""


class KeptLikely:
    """The memory that one request reserves for log probabilities, until its visit ends.

    :param pool: the memory of all requests.
    :param field: request field that asks for log probabilities, for errors.
    """

    def __init__(self, visit: RequestContext, pool: EqualParts, field: str) -> None:
        self._visit, self._pool, self._field = visit, pool, field
        self._room_tokens = self._numbers = 0

    def reserve(
        self, prompt_tokens: Sequence[int], samplings: Sequence[SamplingParams], sequences: int
    ) -> None:
        """Reserve memory for the log probabilities that a request asks for.

        :param prompt_tokens: number of tokens of each prompt, in the order of ``samplings``.
        :param sequences: number of answers to each prompt.
        :raises ChangeSomething: if the request asks for more than :data:`MOST_NUMBERS`.
        :raises TryLater: if the pool has no room now.
        """
        numbers = 0
        for tokens, sampling in zip(prompt_tokens, samplings, strict=True):
            if sampling.prompt_logprobs is not None:
                numbers += tokens * (1 + sampling.prompt_logprobs)
            if sampling.logprobs is not None:
                expected = min(sampling.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
                self._room_tokens += sequences * expected
                self._numbers = 1 + sampling.logprobs
        numbers += self._room_tokens * self._numbers
        if numbers > MOST_NUMBERS:
            remedy = f"ask for at most {MOST_NUMBERS}: fewer answers, tokens or alternatives"
            raise ChangeSomething(
                self._field,
                f"{numbers} log probabilities",
                "are too many",
                remedy,
                bound="logprob_bytes",
            )
        self._keep(numbers)

    async def follow(
        self, deltas: AsyncGenerator[tuple[int, TextDelta], None]
    ) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield the pieces of answers unchanged, and reserve more memory as answers grow.

        :raises TryLater: if the pool has no room for more.
        """
        made_tokens = 0
        async with aclosing(deltas):
            async for index, delta in deltas:
                made_tokens += len(delta.logprobs)
                while made_tokens > self._room_tokens:
                    self._keep(EXPECTED_TOKENS * self._numbers)
                    self._room_tokens += EXPECTED_TOKENS
                yield index, delta

    def _keep(self, numbers: int) -> None:
        if numbers:
            self._visit.keep(self._pool, numbers * BYTES_PER_NUMBER)
