"""The buffer of a request's output, until its reader takes it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs, count_numbers
from kvell.engine.protocol.messages import Finished
from kvell.errors import TryLater


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


class OutputRoom(Protocol):
    """The memory for a request's output until it is sent."""

    def grow(self, tokens: int, numbers: int) -> None:
        """Count tokens and log probabilities that are about to be kept.

        :raises TryLater: if there is no room for them.
        """
        ...

    def add_text(self, text: str) -> None:
        """Count a text that is kept.

        :raises TryLater: if there is no room for it.
        """
        ...


class Mailbox:
    """Tokens that arrived and were not read yet, merged.

    The sender never waits, so a slow reader cannot delay others.

    :param room: counts the output before it is kept; None: it is not counted.
    :param on_full: called once, when there is no room; the reader gets the error.
    """

    def __init__(
        self, room: OutputRoom | None = None, on_full: Callable[[], object] = lambda: None
    ) -> None:
        self._room, self._on_full = room, on_full
        self._refusal: TryLater | None = None
        self._token_ids: list[int] = []
        self._logprobs: KeptLogprobs | None = None
        self._prompt_logprobs: KeptLogprobs | None = None
        self._finished: Finished | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """Append tokens; drop them if there is no room."""
        if self._refusal is not None:
            return
        if self._room is not None:
            try:
                self._room.grow(len(token_ids), count_numbers(logprobs) if logprobs else 0)
            except TryLater as refusal:
                self._refuse(refusal)
                return
        self._token_ids += token_ids
        if logprobs:
            self._logprobs = self._logprobs or KeptLogprobs()
            self._logprobs.extend(logprobs)
        if self._reader is not None:
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
        """Wait for output, and return all of it; for one reader.

        :raises TryLater: if there was no room for further output.
        """
        if not self._token_ids and self._finished is None and self._refusal is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._refusal is not None:
            raise self._refusal
        token_ids = tuple(self._token_ids)
        self._token_ids = []
        if self._logprobs is None and self._prompt_logprobs is None:
            return Output(token_ids, self._finished)
        logprobs = self._logprobs or ()
        self._logprobs = None
        prompt_logprobs = self._prompt_logprobs or ()
        self._prompt_logprobs = None
        return Output(token_ids, self._finished, logprobs, prompt_logprobs)

    def _refuse(self, refusal: TryLater) -> None:
        self._refusal = refusal
        self._token_ids = []
        self._logprobs = self._prompt_logprobs = None
        self._ring()
        self._on_full()

    def _ring(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # a reader that went away is cancelled
            reader.set_result(None)
