"""The process of an instance on another machine."""

import asyncio
import contextlib
import logging
import signal

from kvell.fleet.placing.placement import IncarnationEnd, InstancePlace, Placement, PlacingError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Pause between two questions whether a process has ended."""
KILL_SECONDS = 5.0
"""A machine that has not confirmed a kill after this time counts as dead."""
KILLED = -int(signal.SIGKILL)


class RemoteProcess:
    """A :class:`.Running` process.  For the manager it has ended once its connection is closed.

    The manager does not wait long for a machine that no longer answers: an instance there sees its
    connection end, or the other instances refuse its old incarnation.

    :ivar last_words: last lines of the process on stderr, if the process ended by an error.
    """

    def __init__(
        self, placement: Placement, instance_id: str, incarnation: int, placed: InstancePlace
    ) -> None:
        self._placement, self._instance_id = placement, instance_id
        self._incarnation, self._placed = incarnation, placed
        self._killing: asyncio.Task[None] | None = None
        self._code: int | None = None
        self.last_words = ""

    @property
    def pid(self) -> int:
        return self._placed.pid

    @property
    def host(self) -> str:
        return self._placed.host

    async def wait(self) -> int:
        """Return the exit status; a process whose machine does not answer counts as killed."""
        if self._code is None:
            try:
                async with asyncio.timeout(None if self._killing is None else KILL_SECONDS):
                    self._code = await self._watched()
            except TimeoutError:
                self._code = KILLED
        return self._code

    def kill(self) -> None:
        if self._code is not None:
            raise ProcessLookupError
        if self._killing is None:
            self._killing = asyncio.create_task(self._stop())

    async def _watched(self) -> int:
        try:
            while (ended := await self._ended()) is None:
                await asyncio.sleep(LOOK_SECONDS)
        except PlacingError as error:
            logger.warning("instance %s on %s: %s", self._instance_id, self.host, error)
            return KILLED
        return ended.exit_code

    async def _ended(self) -> IncarnationEnd | None:
        ended = await self._placement.end_of(self._instance_id, self._incarnation)
        if ended is not None and ended.exit_code > 0 and ended.last_words:
            self.last_words = ended.last_words
            log_last_words(self._instance_id, self.host, ended)
        return ended

    async def _stop(self) -> None:
        with contextlib.suppress(PlacingError):  # the machine is dead, and so is the process
            await self._placement.stop(self._instance_id, self._incarnation)


def log_last_words(instance_id: str, host: str, ended: IncarnationEnd) -> None:
    for line in ended.last_words.splitlines():
        logger.error("instance %s on %s wrote: %s", instance_id, host, line)
