"""A front's end of a connection to its cluster's manager: bytes to messages."""

import asyncio
from collections.abc import Callable

from kvell.server.manager.messages import ToFront, ToManager, decode_to_front, encode_message
from kvell.wire.frames import FrameReader, ProtocolError


class ManagerLine(asyncio.Protocol):
    """Tells every message where it is read; what is not the protocol ends the connection.

    :ivar problem: why it ended; "" as long as nothing is known.
    """

    def __init__(self, tell: Callable[[ToFront], None]) -> None:
        self._tell = tell
        self._frames = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._ended = asyncio.Event()
        self.problem = ""

    async def ended(self) -> None:
        """Wait until the connection has ended."""
        await self._ended.wait()

    def send(self, message: ToManager) -> None:
        """Queue a message; nothing comes of it once the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_message(message))

    def abort(self, problem: str = "") -> None:
        """End the connection at once."""
        self.problem = self.problem or problem
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        try:
            for body in self._frames.feed(data):
                self._tell(decode_to_front(body))
        except ProtocolError as error:
            self.abort(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self.problem = self.problem or str(exc or "it hung up")
        self._ended.set()
