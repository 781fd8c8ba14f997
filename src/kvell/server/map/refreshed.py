"""An answer that many viewers share and that is refreshed at most once per interval."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class LatestAnswer(Generic[Made]):
    """The latest answer; many viewers cost no more than one.

    One answer is made at a time, and all viewers that came before its beginning share it.

    :param make: returns a new answer.
    :param every_seconds: shortest interval from the beginning of one refresh to the next; 0 shows
        a viewer no answer that was begun before it came.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Made]],
        now_seconds: Callable[[], float],
        every_seconds: float = 0.0,
    ) -> None:
        self._make, self._now_seconds = make, now_seconds
        self._every_seconds = every_seconds
        self._made: tuple[int, float, Made] | None = None
        self._begun = 0
        self._lock = asyncio.Lock()

    async def latest(self) -> Made:
        """Return the latest answer, or a new one once the interval has passed."""
        begun_before = self._begun
        async with self._lock:  # a caller that waited for the lock finds a new answer
            now = self._now_seconds()
            if self._made is not None:
                number, begun_seconds, answer = self._made
                if number > begun_before or now - begun_seconds < self._every_seconds:
                    return answer
            self._begun += 1
            number = self._begun
            answer = await self._make()
            self._made = number, now, answer
            return answer
