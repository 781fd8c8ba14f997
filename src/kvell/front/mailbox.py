"""The buffer of a request's output, until its reader takes it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Finished


@dataclass(frozen=True)
class Output:
    """New output of a request: token ids in order, and its end if it has come.

    :param logprobs: one for each token, if the request asked for them.
    :param prompt_logprobs: those of further prompt tokens in order, if the request asked for them.
    """

    token_ids: tuple[int, ...]
    finished: Finished | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Mailbox:
    """Tokens that arrived and were not read yet, merged.

    The sender never waits, so a slow reader cannot delay others; the size is bounded, because a
    request's output is.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: KeptLogprobs | None = None
        self._prompt_logprobs: KeptLogprobs | None = None
        self._finished: Finished | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """Append tokens."""
        self._token_ids += token_ids
        if logprobs:
            self._logprobs = self._logprobs or KeptLogprobs()
            self._logprobs.extend(logprobs)
        self._ring()

    def put_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Append log probabilities of prompt tokens, which are read with the first token."""
        self._prompt_logprobs = self._prompt_logprobs or KeptLogprobs()
        self._prompt_logprobs.extend(logprobs)

    def finish(self, finished: Finished) -> None:
        """End the output; only the first call counts."""
        if self._finished is None:
            self._finished = finished
            self._ring()

    async def take(self) -> Output:
        """Wait for output, and return all of it; for one reader."""
        if not self._token_ids and self._finished is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        token_ids = tuple(self._token_ids)
        self._token_ids = []
        if self._logprobs is None and self._prompt_logprobs is None:
            return Output(token_ids, self._finished)
        logprobs = self._logprobs or ()
        self._logprobs = None
        prompt_logprobs = self._prompt_logprobs or ()
        self._prompt_logprobs = None
        return Output(token_ids, self._finished, logprobs, prompt_logprobs)

    def _ring(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # a reader that went away is cancelled
            reader.set_result(None)
