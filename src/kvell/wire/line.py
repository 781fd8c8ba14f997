"""A connection in an event loop: frames in and out, delivered by callback."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from kvell.wire.frames import MAX_FRAME_BYTES, FrameReader, ProtocolError

Heard = TypeVar("Heard")


class MessageLine(asyncio.Protocol, Generic[Heard]):
    """One end of a connection between two processes.

    Callbacks run in ``data_received``: waking a task per token costs an extra loop turn with cold
    caches.  A protocol violation ends the connection.

    :param decode: reads the body of a frame; raises :class:`ProtocolError`.
    :param most_message_bytes: the largest message to receive. The check needs only the header.
    :param most_unsent_bytes: beyond this the connection ends. None: the caller bounds them.
    :ivar problem: why the connection ended, or "".
    """

    def __init__(
        self,
        decode: Callable[[bytes], Heard],
        *,
        most_message_bytes: int = MAX_FRAME_BYTES,
        most_unsent_bytes: int | None = None,
    ) -> None:
        self._decode, self._most_unsent_bytes = decode, most_unsent_bytes
        self._frames = FrameReader(most_message_bytes)
        self._transport: asyncio.WriteTransport | None = None
        self._ended = asyncio.Event()
        self.hear: Callable[[Heard], None] = _nobody_hears
        """The receiver of every message. It must be set before the connection is made."""
        self.problem = ""

    @property
    def is_open(self) -> bool:
        """Whether the connection is up and not closing."""
        return self._transport is not None and not self._transport.is_closing()

    def send_frame(self, frame: bytes) -> None:
        """Queue a frame, or drop it if the connection has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame)
        limit = self._most_unsent_bytes
        if limit is not None and self._transport.get_write_buffer_size() > limit:
            self.abort("it does not read its messages")

    def hang_up(self) -> None:
        """End the connection once everything queued is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, problem: str = "") -> None:
        """End the connection immediately. Unsent frames are lost."""
        self.problem = self.problem or problem
        if self._transport is not None:
            self._transport.abort()

    async def wait_ended(self) -> None:
        """Wait until either side has ended the connection."""
        await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Deliver the messages that are now complete."""
        try:
            for body in self._frames.feed(data):
                self.hear(self._decode(body))
        except ProtocolError as problem:
            self.broken(problem)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record why the connection ended, and wake the waiting tasks."""
        self.problem = self.problem or str(exc or "it closed the connection")
        self._ended.set()

    def broken(self, problem: ProtocolError) -> None:
        """End the connection after a protocol violation."""
        self.abort(str(problem))


def _nobody_hears(_message: object) -> None:
    raise AssertionError("set the handler of messages before connecting")
