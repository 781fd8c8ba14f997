"""The front's end of the connection to an instance."""

import asyncio
from collections.abc import Callable

from typing_extensions import override

from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.messages import Command, Event
from kvell.wire.frames import ProtocolError
from kvell.wire.line import MessageLine


class InstanceLine(MessageLine[Event]):
    """A line that keeps events until :meth:`follow` is called."""

    def __init__(self) -> None:
        super().__init__(decode_event)
        self._kept: list[Event] = []
        self._heard = asyncio.Event()
        self._breach: ProtocolError | None = None
        self.hear = self._keep

    async def first(self) -> Event | None:
        """Return the first event; None if the line ends before it.

        :raises ProtocolError: when the first message breaks the protocol.
        """
        await self._heard.wait()
        if self._kept:
            return self._kept.pop(0)
        if self._breach is not None:
            raise self._breach
        return None

    async def follow(self, hear: Callable[[Event], None]) -> None:
        """Pass every event to ``hear``, kept ones first, until the line ends.

        :raises ProtocolError: when a message breaks the protocol.
        """
        kept, self._kept, self.hear = self._kept, [], hear
        for event in kept:
            hear(event)
        await self._ended.wait()
        if self._breach is not None:
            raise self._breach

    def send(self, command: Command) -> None:
        """Queue a command; credits bound what can be queued.

        :raises ProtocolError: when the command is too long for a frame.
        """
        self.send_frame(encode_frame(command))

    @override
    def data_received(self, data: bytes) -> None:
        if self._breach is None:
            super().data_received(data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._heard.set()

    def broken(self, problem: ProtocolError) -> None:
        """Stop receiving, and let :meth:`first` or :meth:`follow` raise the problem."""
        self._breach = problem
        self._heard.set()
        self._ended.set()

    def _keep(self, event: Event) -> None:
        self._kept.append(event)
        self._heard.set()
