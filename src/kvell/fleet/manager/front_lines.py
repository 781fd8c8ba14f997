"""The connections of a manager to its fronts."""

import asyncio
import logging
from collections.abc import Collection

from kvell.fleet.manager.front_line import FrontLine
from kvell.fleet.manager.messages import ToFront

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 2.0
"""Time for fronts to receive the messages that are queued when the manager closes."""


class FrontLines:
    """One line for each front, and the lines of fronts that left, until they are disconnected."""

    def __init__(self) -> None:
        self._by_front: dict[str, FrontLine] = {}
        self._leaving: set[FrontLine] = set()

    def __len__(self) -> int:
        return len(self._by_front)

    def __contains__(self, line: FrontLine) -> bool:
        return self._by_front.get(line.front) is line

    def add(self, line: FrontLine) -> bool:
        """Add the connection of a front, in place of an earlier one.

        :returns: False for an earlier connection that arrives late, which is then closed.
        """
        before = self._by_front.get(line.front)
        if before is not None and line.incarnation < before.incarnation:
            line.abort("it arrived after a newer connection")
            return False
        self._by_front[line.front] = line
        if before is not None:
            before.abort()
        return True

    def leave(self, line: FrontLine) -> None:
        del self._by_front[line.front]
        self._leaving.add(line)

    def on_ended(self, line: FrontLine) -> None:
        self._leaving.discard(line)
        if line in self:
            logger.warning("the connection of front %s ended", line.front)
            del self._by_front[line.front]

    def tell_front(self, front: str, message: ToFront) -> None:
        if front in self._by_front:
            self._by_front[front].send(message)

    def tell_all(self, message: ToFront) -> None:
        for line in list(self._by_front.values()):
            line.send(message)

    def drop_all_but(self, living: Collection[str]) -> None:
        for front, line in list(self._by_front.items()):
            if front not in living:
                logger.warning("front %s sent nothing for its lease", front)
                line.abort()

    def release_leaving(self) -> None:
        for line in self._leaving:
            line.hang_up()

    async def close(self) -> None:
        """Disconnect all fronts, after they have read their messages or a short time."""
        lines = [*self._by_front.values(), *self._leaving]
        for line in lines:
            line.hang_up()
        ends = [asyncio.create_task(line.wait_ended()) for line in lines]
        if ends:
            _, late = await asyncio.wait(ends, timeout=LAST_WORDS_SECONDS)
            for end in late:
                end.cancel()
        for line in lines:
            line.abort()
