"""An answer that many may ask for, and that is made only so often."""

import asyncio
from collections.abc import Awaitable, Callable


class Refreshed:
    """Keeps the latest answer; many viewers cost no more than one.

    :param make: makes a new answer.
    :param now_seconds: the time.
    :param every_seconds: at least so long from the beginning of one refresh to the next.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        now_seconds: Callable[[], float],
        every_seconds: float,
    ) -> None:
        self._make, self._now_seconds = make, now_seconds
        self._every_seconds = every_seconds
        self._latest = b""
        self._begun_seconds: float | None = None
        self._lock = asyncio.Lock()

    async def latest(self) -> bytes:
        """The latest answer; a new one if it is time for it."""
        async with self._lock:  # a caller that waited for the lock finds a new answer
            now = self._now_seconds()
            begun = self._begun_seconds
            if begun is None or now - begun >= self._every_seconds:
                self._latest = await self._make()
                self._begun_seconds = now
            return self._latest
