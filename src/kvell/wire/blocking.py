"""A TCP connection that one thread at a time uses: frames and raw bytes, and when to give up."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from kvell.wire.decoding import Decoder, decode
from kvell.wire.frames import HEADER_BYTES, FrameReader, ProtocolError, framed

LOOK_SECONDS = 0.1
"""While nothing comes or goes, between two looks whether to give up."""
MOST_PARTS = 512
"""Parts of memory in one call of the system, which takes 1,024."""

Look = Callable[[], None]
"""Raises when it is time to give up."""
Part = bytes | bytearray | memoryview
Message = TypeVar("Message")


class Stopped(Exception):  # noqa: N818 - what happened
    """Whoever asked does not wait any more."""


def within(seconds: float) -> Look:
    """Give up after a time, with :class:`TimeoutError`."""
    deadline = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the peer took more than {seconds:g} s")

    return look


def unless(stop: threading.Event) -> Look:
    """Give up when an event is set, with :class:`Stopped`."""

    def look() -> None:
        if stop.is_set():
            raise Stopped

    return look


class BlockingSocket:
    """A connection; only :meth:`hang_up` may be called from another thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(LOOK_SECONDS)

    def say(self, message: object, look: Look) -> None:
        """Send a message.

        :raises OSError: when the connection fails, or ``look`` gives up.
        """
        self.send([framed(msgspec.msgpack.encode(message))], look)

    def hear(self, decoder: Decoder[Message], most_bytes: int, look: Look) -> Message:
        """Receive a message.

        :raises ProtocolError: when something else comes, or more bytes, or the end.
        :raises OSError: when the connection fails, or ``look`` gives up.
        """
        return decode(decoder, self.hear_body(most_bytes, look))

    def hear_body(self, most_bytes: int, look: Look) -> bytes:
        """Receive the body of a frame and nothing behind it; see :meth:`hear`."""
        header, reader = bytearray(HEADER_BYTES), FrameReader()
        self.receive([header], look)
        bodies = reader.feed(bytes(header))
        if not bodies:
            length_bytes = int.from_bytes(header[:4], "little")
            if length_bytes > most_bytes:
                raise ProtocolError(f"a message of {length_bytes} bytes exceeds {most_bytes}")
            body = bytearray(length_bytes)
            self.receive([body], look)
            bodies = reader.feed(bytes(body))
        return bodies[0]

    def wait(self) -> None:
        """Wait, however long, until something comes or the connection ends."""
        self.socket.settimeout(None)
        self.socket.recv(1, socket.MSG_PEEK)
        self.socket.settimeout(LOOK_SECONDS)

    def send(self, parts: Sequence[Part], look: Look) -> None:
        """Send bytes straight from where they are; they are read when the call of the system is."""
        left = _views(parts)
        while left:
            with contextlib.suppress(TimeoutError):  # it takes nothing now
                _forget(left, self.socket.sendmsg(list(islice(left, MOST_PARTS))))
            look()

    def receive(self, parts: Sequence[bytearray | memoryview], look: Look) -> None:
        """Fill parts of memory with what comes.

        :raises ProtocolError: when less comes.
        """
        left = _views(parts)
        while left:
            try:
                count, *_ = self.socket.recvmsg_into(list(islice(left, MOST_PARTS)))
            except TimeoutError:
                look()
                continue
            if not count:
                raise ProtocolError("the peer hung up")
            _forget(left, count)
            look()

    def hang_up(self) -> None:
        """End the connection, and with it the wait of a thread inside a call."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and let go."""
        self.socket.close()


def _views(parts: Sequence[Part]) -> deque[memoryview]:
    return deque(view for part in parts if (view := memoryview(part)).nbytes)


def _forget(left: deque[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes."""
    while left and count >= left[0].nbytes:
        count -= left.popleft().nbytes
    if count:
        left[0] = left[0][count:]
