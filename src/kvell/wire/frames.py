"""Messages as bytes of a stream: frames with checksums.

A frame is a header and a body.  A header is three little-endian u32::

    0             4                       8                    12
    │ body length │ crc32 of those 4 bytes │ crc32 of the body │

The length has its own checksum. The reader detects a damaged length when it has the header, and
never waits for bytes that do not arrive.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Generic, TypeVar
from zlib import crc32

from kvell.errors import KvellError

HEADER_BYTES = 12
MAX_FRAME_BYTES = 64 << 20
"""The largest body that either side accepts: a prompt of 16 million tokens fits."""

_LENGTH_BYTES = 4
_CHECKSUMS = struct.Struct("<II")
_HEADER = struct.Struct("<III")
assert _HEADER.size == HEADER_BYTES


class ProtocolError(KvellError):
    """The peer violated the protocol. The connection is unusable."""


def frame(body: bytes) -> bytes:
    """Return a body with its header.

    :raises ProtocolError: when the body exceeds ``MAX_FRAME_BYTES``.
    """
    if len(body) > MAX_FRAME_BYTES:
        raise _too_long(len(body), MAX_FRAME_BYTES)
    length = len(body).to_bytes(_LENGTH_BYTES, "little")
    return length + _CHECKSUMS.pack(crc32(length), crc32(body)) + body


def _too_long(length_bytes: int, most_bytes: int) -> ProtocolError:
    return ProtocolError(f"a frame of {length_bytes} bytes exceeds {most_bytes}")


class FrameReader:
    """A parser that cuts a byte stream into frame bodies and buffers at most one unfinished frame.

    :param most_bytes: the largest accepted body. The check needs only the header.
    """

    def __init__(self, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    @property
    def missing_bytes(self) -> int:
        if len(self._buffer) < HEADER_BYTES:
            return HEADER_BYTES - len(self._buffer)
        length_bytes = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        return HEADER_BYTES + length_bytes - len(self._buffer)

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes and return the bodies that are now complete, in order.

        :raises ProtocolError: when a complete header is damaged or announces too long a body, or
            a complete body is damaged.  Every later call raises it again, because the rest of the
            stream cannot be trusted.
        """
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) >= (begin := start + HEADER_BYTES):
            length_bytes, length_crc, body_crc = _HEADER.unpack_from(buffer, start)
            if crc32(buffer[start : start + _LENGTH_BYTES]) != length_crc:
                raise ProtocolError("the header of a frame is damaged: its checksum differs")
            if length_bytes > self._most_bytes:
                raise _too_long(length_bytes, self._most_bytes)
            end = begin + length_bytes
            if len(buffer) < end:
                break
            body = bytes(buffer[begin:end])
            if crc32(body) != body_crc:
                raise ProtocolError("the body of a frame is damaged: its checksum differs")
            bodies.append(body)
            start = end
        del buffer[:start]
        return bodies


Heard = TypeVar("Heard")


class MessageLine(asyncio.Protocol, Generic[Heard]):
    """One end of a connection between two processes.

    Callbacks run in ``data_received``: waking a task per token costs an extra loop turn with cold
    caches.  A protocol violation ends the connection.

    :param decode: reads the body of a frame; raises :class:`ProtocolError`.
    :param most_message_bytes: the largest message to receive. The check needs only the header.
    :param most_unsent_bytes: beyond this the connection ends. None: the caller bounds them.
    :ivar ended: set once either side has ended the connection.
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
        self.ended = asyncio.Event()
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self.hear(self._decode(body))
        except ProtocolError as problem:
            self.broken(problem)

    def connection_lost(self, exc: Exception | None) -> None:
        self.problem = self.problem or str(exc or "it closed the connection")
        self.ended.set()

    def broken(self, problem: ProtocolError) -> None:
        self.abort(str(problem))


def _nobody_hears(_message: object) -> None:
    raise AssertionError("set the handler of messages before connecting")
