"""The front's end of the line to an instance: bytes to events, told as soon as they are read."""

import asyncio
from collections.abc import Callable

from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.messages import Command, Event
from kvell.wire.frames import FrameReader, ProtocolError


class InstanceLine(asyncio.Protocol):
    """Events are told where they are read, and no task is woken to pass them on: nothing of what
    runs for a token is in the caches when it comes, so every turn of the loop counts.

    What comes before anybody follows is kept.
    """

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._kept: list[Event] = []
        self._tell: Callable[[Event], None] = self._keep
        self._heard, self._ended = asyncio.Event(), asyncio.Event()
        self._problem: ProtocolError | None = None
        self._transport: asyncio.WriteTransport | None = None

    async def first(self) -> Event | None:
        """The first event; None if the line ends before.

        :raises ProtocolError: when something else than the protocol came first.
        """
        await self._heard.wait()
        if self._kept:
            return self._kept.pop(0)
        if self._problem is not None:
            raise self._problem
        return None

    async def follow(self, tell: Callable[[Event], None]) -> None:
        """Tell every event, those that were kept first, until the line ends.

        :raises ProtocolError: when something comes that is not the protocol.
        """
        kept, self._kept, self._tell = self._kept, [], tell
        for event in kept:
            tell(event)
        await self._ended.wait()
        if self._problem is not None:
            raise self._problem

    def send(self, command: Command) -> None:
        """Queue a command; credits bound what can be queued.

        :raises ProtocolError: when it is too long for a frame.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(command))

    def close(self) -> None:
        """Our end."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the line at once; what was not sent yet is lost."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._problem is not None:
            return
        try:
            for body in self._frames.feed(data):
                self._tell(decode_event(body))
        except ProtocolError as problem:
            self._problem = problem
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._end()

    def _keep(self, event: Event) -> None:
        self._kept.append(event)
        self._heard.set()

    def _end(self) -> None:
        self._heard.set()
        self._ended.set()
