"""The manager's end of a connection to a front."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from typing_extensions import override

from kvell.fleet.manager.messages import ToFront, ToManager, decode_to_manager, encode_message
from kvell.wire.line import MessageLine

logger = logging.getLogger(__name__)

MOST_MESSAGE_BYTES = 1 << 20
"""Largest size of a message of a front."""
MOST_WAITING_BYTES = 1 << 20
"""A front with more queued bytes does not read, and is disconnected."""


class FrontLine(MessageLine[ToManager]):
    """A connection of the manager to a front.

    :param incarnation: of the connection; a later one of the same front has a higher one.
    :param came: receives this line once it is connected.
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
