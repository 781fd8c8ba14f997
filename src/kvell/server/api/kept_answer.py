"""Memory of answers until they are sent: bounded, and charged to its tenant."""

from collections.abc import Sequence

from kvell.engine.protocol.logprobs import count_numbers
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.server.access.visit import RequestContext
from kvell.server.text.answer_memory import TOLD_BYTES, AnswerMemory, text_bytes
from kvell.server.text.text_stream import TextDelta

EXPECTED_TOKENS = 512
"""Tokens of an answer to reserve memory for: at first, and in each later step."""
BYTES_PER_NUMBER = 16
"""Bytes of a token and its probability in :class:`.KeptLogprobs`, with room to grow."""
MOST_NUMBERS = TOLD_BYTES // BYTES_PER_NUMBER
"""Log probabilities that one request may ask for."""
TOKEN_BYTES = 64
"""Bytes of a token of an answer, without its text's characters."""
STEP_BYTES = 1 << 14
"""Bytes to reserve at a time for tokens and texts."""


class KeptAnswer:
    """The memory that the answers to one request reserve, until its visit ends.

    It is the :class:`.OutputRoom` of the request: output is counted before it is kept.

    :param field: request field that asks for log probabilities, for errors.
    :param frees: whether output is forgotten once it is sent, as in a stream.
    """

    def __init__(
        self, visit: RequestContext, memory: AnswerMemory, field: str, *, frees: bool
    ) -> None:
        self._visit, self._memory, self._field, self._frees = visit, memory, field, frees
        self._held_numbers = self._reserved_numbers = 0
        self._held_bytes = self._reserved_bytes = 0
        self._step_numbers = EXPECTED_TOKENS

    def reserve(
        self, prompt_tokens: Sequence[int], samplings: Sequence[SamplingParams], sequences: int
    ) -> None:
        """Reserve memory for the log probabilities that a request asks for.

        :param prompt_tokens: number of tokens of each prompt, in the order of ``samplings``.
        :param sequences: number of answers to each prompt.
        :raises ChangeSomething: if the request asks for more than :data:`MOST_NUMBERS`.
        :raises TryLater: if the pool has no room now.
        """
        of_prompts = of_answers = 0
        for tokens, sampling in zip(prompt_tokens, samplings, strict=True):
            if sampling.prompt_logprobs is not None:
                of_prompts += tokens * (1 + sampling.prompt_logprobs)
            if sampling.logprobs is not None:
                expected = min(sampling.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
                of_answers += sequences * expected * (1 + sampling.logprobs)
                self._step_numbers = EXPECTED_TOKENS * (1 + sampling.logprobs)
        numbers = of_prompts + of_answers
        if numbers > MOST_NUMBERS:
            remedy = f"ask for at most {MOST_NUMBERS}: fewer answers, tokens or alternatives"
            raise ChangeSomething(
                self._field,
                f"{numbers} log probabilities",
                "are too many",
                remedy,
                bound="logprob_bytes",
            )
        if numbers:
            self._visit.keep(self._memory.logprobs, numbers * BYTES_PER_NUMBER)
            self._reserved_numbers = of_answers

    def grow(self, tokens: int, numbers: int) -> None:
        """Count output.

        :raises TryLater: if there is no room for it.
        """
        self._held_bytes += tokens * TOKEN_BYTES
        if self._held_bytes > self._reserved_bytes:
            self._reserve_bytes()
        if not numbers:
            return
        while self._held_numbers + numbers > self._reserved_numbers:
            self._visit.keep(self._memory.logprobs, self._step_numbers * BYTES_PER_NUMBER)
            self._reserved_numbers += self._step_numbers
        self._held_numbers += numbers

    def add_text(self, text: str) -> None:
        """Count a text.

        :raises TryLater: if there is no room for it.
        """
        self._held_bytes += text_bytes(text)
        if self._held_bytes > self._reserved_bytes:
            self._reserve_bytes()

    def on_sent(self, delta: TextDelta) -> None:
        """Note that a piece was sent."""
        if self._frees:
            self._held_bytes -= len(delta.token_ids) * TOKEN_BYTES + text_bytes(delta.text)
            if delta.logprobs:
                self._held_numbers -= count_numbers(delta.logprobs)

    def _reserve_bytes(self) -> None:
        """Reserve what is held, in steps; a request that is refused keeps nothing."""
        steps = -(-(self._held_bytes - self._reserved_bytes) // STEP_BYTES)
        self._visit.keep(self._memory.texts, steps * STEP_BYTES)
        self._reserved_bytes += steps * STEP_BYTES
