"""A way to wake a thread that waits in a selector, from another thread or a signal handler."""

import contextlib
import socket
import weakref


class Bell:
    """A descriptor that becomes readable when another thread rings.

    It is closed with :meth:`close`, or with the object.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self.descriptor = self._reader.fileno()
        self.close = weakref.finalize(self, _close, self._reader, self._writer)

    def ring(self) -> None:
        """Make the descriptor readable. Any thread or signal handler may call it."""
        with contextlib.suppress(OSError):  # the socket is full, so readable, or closed
            self._writer.send(b"w")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)


def _close(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()
