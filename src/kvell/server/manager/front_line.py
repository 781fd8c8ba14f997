"""The manager's end of the line to a front: bytes to messages, and bounds for both ways."""

import asyncio
import logging
from collections.abc import Callable

from kvell.server.manager.messages import (
    ToFront,
    ToManager,
    decode_to_manager,
    encode_message,
)
from kvell.wire.frames import FrameReader, ProtocolError

logger = logging.getLogger(__name__)

MOST_MESSAGE_BYTES = 1 << 20
"""Most bytes of a message of a front."""
MOST_WAITING_BYTES = 1 << 20
"""A front for which more bytes wait does not read, and is hung up on."""


class FrontLine(asyncio.Protocol):
    """A connected front.

    :param front: its name.
    :param came: gets this line once it is connected.
    :param tell: gets this line and each message, in order.
    :param ended: gets this line when the connection has ended, whoever ended it.
    """

    def __init__(
        self,
        front: str,
        came: Callable[["FrontLine"], None],
        tell: Callable[["FrontLine", ToManager], None],
        ended: Callable[["FrontLine"], None],
    ) -> None:
        self.front = front
        self._came, self._tell, self._told_end = came, tell, ended
        self._frames = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._ended = asyncio.Event()

    def send(self, message: ToFront) -> None:
        """Queue a message, unless too much waits: then the connection ends."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_message(message))
        if self._transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            self._drop("it does not read")

    def hang_up(self) -> None:
        """End the connection once everything queued is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_ended(self) -> None:
        """Wait until the connection has ended."""
        await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._came(self)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        try:
            for body in self._frames.feed(data):
                self._tell(self, decode_to_manager(body))
            if self._frames.pending_bytes > MOST_MESSAGE_BYTES:
                raise ProtocolError(f"a message exceeds {MOST_MESSAGE_BYTES} bytes")
        except ProtocolError as problem:
            self._drop(str(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._ended.set()
        self._told_end(self)

    def _drop(self, problem: str) -> None:
        logger.warning("front %s was hung up on: %s", self.front, problem)
        self.abort()
