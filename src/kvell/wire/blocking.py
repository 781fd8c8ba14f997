"""A blocking connection for one thread at a time: frames and raw bytes, with a stop condition."""

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
from kvell.wire.frames import HEADER_BYTES, FrameReader, ProtocolError, frame

LOOK_SECONDS = 0.1
"""The time between two checks of the stop condition while no bytes are transferred."""
MOST_PARTS = 512
"""Buffers passed in one system call. Linux allows 1,024."""

Look = Callable[[], None]
"""A check of the stop condition. It raises when the caller must give up."""
Part = bytes | bytearray | memoryview
Message = TypeVar("Message")


class WaitStopped(Exception):  # noqa: N818 - what happened
    """The caller no longer waits for the result."""


def within(seconds: float) -> Look:
    """Return a check that raises :class:`TimeoutError` after ``seconds``."""
    deadline = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the peer took more than {seconds:g} s")

    return look


def unless(stop: threading.Event) -> Look:
    """Return a check that raises :class:`WaitStopped` once an event is set."""

    def look() -> None:
        if stop.is_set():
            raise WaitStopped

    return look


class BlockingSocket:
    """A blocking connection. Calls raise what their ``look`` raises. Only :meth:`hang_up` may be
    called from another thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(LOOK_SECONDS)

    def say(self, message: object, look: Look) -> None:
        """Send a message.

        :raises OSError: when the connection fails.
        """
        self.send([frame(msgspec.msgpack.encode(message))], look)

    def hear(self, decoder: Decoder[Message], most_bytes: int, look: Look) -> Message:
        """Receive a message.

        :raises ProtocolError: when the message is malformed or too long, or the peer hangs up.
        :raises OSError: when the connection fails.
        """
        return decode(decoder, self.hear_body(most_bytes, look))

    def hear_body(self, most_bytes: int, look: Look) -> bytes:
        """Receive the body of one frame and no byte after it; see :meth:`hear`."""
        header = bytearray(HEADER_BYTES)
        reader = FrameReader()
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
        """Wait without a timeout until bytes arrive or the connection ends."""
        self.socket.settimeout(None)
        self.socket.recv(1, socket.MSG_PEEK)
        self.socket.settimeout(LOOK_SECONDS)

    def send(self, parts: Sequence[Part], look: Look) -> None:
        """Send bytes without a copy. Each buffer is read when its system call runs."""
        left = _views(parts)
        while left:
            with contextlib.suppress(TimeoutError):  # the send buffer is full
                _forget(left, self.socket.sendmsg(list(islice(left, MOST_PARTS))))
            look()

    def receive(self, parts: Sequence[bytearray | memoryview], look: Look) -> None:
        """Fill buffers with received bytes.

        :raises ProtocolError: when the peer closes the connection before they are full.
        """
        left = _views(parts)
        while left:
            try:
                count, *_ = self.socket.recvmsg_into(list(islice(left, MOST_PARTS)))
            except TimeoutError:
                look()
                continue
            if not count:
                raise ProtocolError("the peer closed the connection")
            _forget(left, count)
            look()

    def hang_up(self) -> None:
        """Shut the connection down, which wakes a thread that waits on it."""
        with contextlib.suppress(OSError):  # it is closed already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def _views(parts: Sequence[Part]) -> deque[memoryview]:
    return deque(view for part in parts if (view := memoryview(part)).nbytes)


def _forget(left: deque[memoryview], count: int) -> None:
    while left and count >= left[0].nbytes:
        count -= left.popleft().nbytes
    if count:
        left[0] = left[0][count:]
