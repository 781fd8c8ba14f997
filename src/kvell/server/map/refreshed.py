"""An answer that many viewers share and that is refreshed at most once per interval."""

import asyncio
from collections.abc import Awaitable, Callable


class LatestAnswer:
    """The latest answer; many viewers cost no more than one.

    :param make: returns a new answer.
    :param every_seconds: shortest interval from the beginning of one refresh to the next.
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
        """Return the latest answer, or a new one once the interval has passed."""
        async with self._lock:  # a caller that waited for the lock finds a new answer
            now = self._now_seconds()
            begun = self._begun_seconds
            if begun is None or now - begun >= self._every_seconds:
                self._latest = await self._make()
                self._begun_seconds = now
            return self._latest
