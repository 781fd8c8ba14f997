"""Where a request's output waits for its reader."""

import asyncio
from dataclasses import dataclass

from kvell.engine.protocol import Finished


@dataclass(frozen=True)
class Output:
    """New output of a request: token ids in order, and its end when it has come."""

    token_ids: tuple[int, ...]
    finished: Finished | None = None


class Mailbox:
    """Tokens that arrived and were not read yet, merged.

    It never makes the sender wait, so one slow reader cannot hold up the others;
    it is bounded because a request's output is.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._finished: Finished | None = None
        self._bell = asyncio.Event()

    def put(self, token_ids: tuple[int, ...]) -> None:
        """Add tokens behind those that wait."""
        self._token_ids += token_ids
        self._bell.set()

    def finish(self, finished: Finished) -> None:
        """Say that no more will come; the first call counts."""
        if self._finished is None:
            self._finished = finished
            self._bell.set()

    async def take(self) -> Output:
        """All that waits, as soon as there is anything."""
        await self._bell.wait()
        self._bell.clear()
        token_ids, self._token_ids = tuple(self._token_ids), []
        return Output(token_ids, self._finished)
