"""Log probabilities that an answer keeps until it is sent: bounded, and charged to its tenant."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.equal_parts import EqualParts
from kvell.errors import ChangeSomething
from kvell.server.access.visit import Visit
from kvell.server.text.lanes import MOST_TOLD_BYTES
from kvell.server.text.text_stream import TextDelta

EXPECTED_TOKENS = 512
"""Of an answer, for which there must be room at once; further ones find it as they come."""
BYTES_PER_NUMBER = 16
"""Of a token and its probability in :class:`.KeptLogprobs`, with room to grow."""
MOST_NUMBERS = MOST_TOLD_BYTES // 2 // BYTES_PER_NUMBER
"""That one request may ask for."""


class KeptLikely:
    """Counts what one request keeps; it ends with the request's visit.

    :param pool: of all requests.
    :param field: of the request that asks for them; for errors.
    """

    def __init__(self, visit: Visit, pool: EqualParts, field: str) -> None:
        self._visit, self._pool, self._field = visit, pool, field
        self._room_tokens = self._numbers = 0

    def reserve(
        self, prompt_tokens: Sequence[int], samplings: Sequence[SamplingParams], sequences: int
    ) -> None:
        """Find room for what a request asks for.

        :param prompt_tokens: of each prompt, like ``samplings``.
        :param sequences: answers to each prompt.
        :raises ChangeSomething: if it asks for more than any may keep.
        :raises TryLater: if there is no room for it now.
        """
        numbers = 0
        for tokens, one in zip(prompt_tokens, samplings, strict=True):
            if one.prompt_logprobs is not None:
                numbers += tokens * (1 + one.prompt_logprobs)
            if one.logprobs is not None:
                expected = min(one.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
                self._room_tokens += sequences * expected
                self._numbers = 1 + one.logprobs
        numbers += self._room_tokens * self._numbers
        if numbers > MOST_NUMBERS:
            remedy = f"ask for at most {MOST_NUMBERS}: fewer answers, tokens or alternatives"
            raise ChangeSomething(
                *(self._field, f"{numbers} log probabilities", "are too many", remedy),
                bound="logprob_bytes",
            )
        self._keep(numbers)

    async def follow(
        self, deltas: AsyncGenerator[tuple[int, TextDelta], None]
    ) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """The same pieces of answers that are sent whole.

        :raises TryLater: where one finds no room.
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
