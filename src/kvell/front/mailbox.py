"""Where a request's output waits for its reader."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Finished


@dataclass(frozen=True)
class Output:
    """New output of a request: token ids in order, and its end when it has come.

    :param logprobs: one for each token, if the request asked for them.
    :param prompt_logprobs: of further tokens of its prompt, in order, likewise.
    """

    token_ids: tuple[int, ...]
    finished: Finished | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Mailbox:
    """Tokens that arrived and were not read yet, merged.

    It never makes the sender wait, so one slow reader cannot hold up the others;
    it is bounded because a request's output is.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: KeptLogprobs | None = None
        self._prompt_logprobs: KeptLogprobs | None = None
        self._finished: Finished | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """Add tokens behind those that wait."""
        self._token_ids += token_ids
        if logprobs:
            self._logprobs = self._logprobs or KeptLogprobs()
            self._logprobs.extend(logprobs)
        self._ring()

    def put_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Add how likely further tokens of the prompt are; they wait for the first token."""
        self._prompt_logprobs = self._prompt_logprobs or KeptLogprobs()
        self._prompt_logprobs.extend(logprobs)

    def finish(self, finished: Finished) -> None:
        """Say that no more will come; the first call counts."""
        if self._finished is None:
            self._finished = finished
            self._ring()

    async def take(self) -> Output:
        """All that waits, as soon as there is anything; for one reader."""
        if not self._token_ids and self._finished is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        token_ids, self._token_ids = tuple(self._token_ids), []
        if self._logprobs is None and self._prompt_logprobs is None:
            return Output(token_ids, self._finished)
        logprobs, self._logprobs = self._logprobs or (), None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs or (), None
        return Output(token_ids, self._finished, logprobs, prompt_logprobs)

    def _ring(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # one that went away is cancelled
            reader.set_result(None)
