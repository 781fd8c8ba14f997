"""A watch on clients that read their answers too slowly."""

import array
import asyncio
import contextlib
import fcntl
import termios
from collections.abc import Callable


class UnreadWatch:
    """A watch that calls back if a client reads too few bytes in an interval.

    :param seconds: interval between two checks.
    :param fewest_bytes: bytes that the client must read in an interval.
    :param stalled: called once, when the client has read less.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        seconds: float,
        fewest_bytes: float,
        stalled: Callable[[], None],
    ) -> None:
        self._loop, self._transport = loop, transport
        self._seconds, self._fewest_bytes, self._stalled = seconds, fewest_bytes, stalled
        self._unread_bytes = 0
        self._due: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._due is None:
            self._unread_bytes = self._count_unread()
            self._due = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _look(self) -> None:
        self._due = None
        if self._unread_bytes - self._count_unread() < self._fewest_bytes:
            self._stalled()
        else:
            self.begin()

    def _count_unread(self) -> int:
        """Return the bytes that the client has not acknowledged, here and in the system's buffer.

        The system's buffer accepts more only when a third of it is free, which can be megabytes.
        So the bytes here alone do not distinguish a slow reader from one that does not read.
        """
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):  # without support, its buffer counts as read
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + queued[0]
