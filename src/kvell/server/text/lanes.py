"""Threads that texts and pictures wait for, so that long ones hold nobody up but each other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvell.device.process_size import give_back_freed
from kvell.errors import Bound, TryLater
from kvell.server.text.held_tensors import HeldTensors
from kvell.server.text.text_bounds import SHORT_BYTES
from kvell.vocabulary import MIB

Made = TypeVar("Made")
WAITING_BYTES = 32 * MIB
"""Of texts, and apart from that of pictures, that may wait for a thread."""


class Lane:
    """One thread, and who waits for it in order; a cancelled caller leaves the line.

    :param bound: that is exceeded when too much waits.
    :param most_bytes: that may wait and be worked on; what comes to an empty lane is always taken.
    :param trims: whether freed memory goes back to the system after each piece of work.
    """

    def __init__(self, name: str, bound: Bound, most_bytes: int, *, trims: bool) -> None:
        self._bound, self._most_bytes, self._trims = bound, most_bytes, trims
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = asyncio.Semaphore(1)
        self.bytes_here = 0

    async def run(self, size_bytes: int, work: Callable[[], Made]) -> Made:
        """Do a piece of work in the thread, and return what it makes.

        Being cancelled while it runs does not stop it, and the next piece waits for its end.

        :raises TryLater: if too much waits already.
        """
        if self.bytes_here and self.bytes_here + size_bytes > self._most_bytes:
            told = f"{self.bytes_here} bytes wait to be read; try again"
            raise TryLater(told, bound=self._bound)
        self.bytes_here += size_bytes
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self.bytes_here -= size_bytes
            raise

        def ended(future: "asyncio.Future[Made]") -> None:
            self.bytes_here -= size_bytes
            self._turn.release()
            if not future.cancelled():
                future.exception()  # nobody may be left to hear of it

        running = asyncio.wrap_future(self._thread.submit(self._done, work))
        running.add_done_callback(ended)
        return await asyncio.shield(running)

    def close(self) -> None:
        """End the thread, after the work that it has begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: Callable[[], Made]) -> Made:
        try:
            return work()
        finally:
            if self._trims:
                give_back_freed()


class TextWork:
    """The lanes of one process, which all its models share.

    :ivar pictures: decodes pictures, those of one request at a time.
    :ivar held: tensors of pictures in requests that have not ended.
    """

    def __init__(self) -> None:
        self._short = Lane("kvell-short-texts", "text_bytes", WAITING_BYTES, trims=False)
        self._long = Lane("kvell-long-texts", "text_bytes", WAITING_BYTES, trims=True)
        self.pictures = Lane("kvell-pictures", "image_pixels", 2 * WAITING_BYTES, trims=True)
        self.held = HeldTensors()

    async def run(self, size_bytes: int, work: Callable[[], Made]) -> Made:
        """Work on a text among those of its kind, short or long.

        :raises TryLater: if too many of them wait.
        """
        lane = self._short if size_bytes <= SHORT_BYTES else self._long
        return await lane.run(size_bytes, work)

    def close(self) -> None:
        """End the threads."""
        for lane in (self._short, self._long, self.pictures):
            lane.close()
