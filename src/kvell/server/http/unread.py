"""Watches whether a client reads its answer, once too much of that waits for it."""

import array
import asyncio
import contextlib
import fcntl
import termios
from collections.abc import Callable


class UnreadWatch:
    """Calls back if a client reads less than so many bytes in so many seconds.

    :param seconds: between two looks.
    :param fewest_bytes: that it reads in that time.
    :param stalled: is called once, when it did not.
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
        """Look in some time at what was read until then; a watch that runs goes on."""
        if self._due is None:
            self._unread_bytes = self._count_unread()
            self._due = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """Look no more."""
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
        """Bytes that the client has not acknowledged: they are here, or in the system's buffer.

        The system's buffer takes more only when a third of it is free, which can be megabytes: what
        is here alone does not tell a slow reader from none.
        """
        queued = array.array("i", [0])
        with contextlib.suppress(OSError):  # a system that does not tell: then all of it is read
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + queued[0]
