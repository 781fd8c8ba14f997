"""The connections of a manager to its fronts."""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

from typing_extensions import override

from kvell.fleet.manager.messages import ToFront, ToManager, decode_to_manager, encode_message
from kvell.wire.frames import MessageLine

MOST_MESSAGE_BYTES = 1 << 20
"""Largest size of a message of a front."""
MOST_WAITING_BYTES = 1 << 20
"""A front with more queued bytes does not read, and is disconnected."""


class FrontLine(MessageLine[ToManager]):
    """A connection of the manager to a front.

    :param incarnation: of the connection; a later one of the same front has a higher one.
    :param receive: receives this line and each message, in order.
    :param ended: receives this line when either side has ended the connection.
    """

    def __init__(
        self,
        front: str,
        incarnation: int,
        came: Callable[["FrontLine"], None],
        receive: Callable[["FrontLine", ToManager], None],
        ended: Callable[["FrontLine"], None],
    ) -> None:
        super().__init__(
            decode_to_manager,
            most_message_bytes=MOST_MESSAGE_BYTES,
            most_unsent_bytes=MOST_WAITING_BYTES,
        )
        self.incarnation = incarnation
        self.front = front
        self.hear = partial(receive, self)
        self._came, self._told_end = came, ended

    def send(self, message: ToFront) -> None:
        """Queue a message; the connection ends if too much is queued."""
        self.send_frame(encode_message(message))

    @override
    def abort(self, problem: str = "") -> None:
        if problem:
            logger.warning("front %s was disconnected: %s", self.front, problem)
        super().abort(problem)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._came(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._told_end(self)


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
        lines = [*self._by_front.values(), *self._leaving]
        for line in lines:
            line.hang_up()
        ends = [asyncio.create_task(line.ended.wait()) for line in lines]
        if ends:
            _, late = await asyncio.wait(ends, timeout=LAST_WORDS_SECONDS)
            for end in late:
                end.cancel()
        for line in lines:
            line.abort()
