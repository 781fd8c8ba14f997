"""A new connection to an instance after a cut, before the instance counts as dead.

::

    cut ──dials, for n looks──► reached ──waits──► Ready
     │                            └────────────────────────┐
     └── the process ends, or is not reached ──► nothing ◄─┘
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import KvellError
from kvell.fleet.instance.instance_line import InstanceLine
from kvell.fleet.instance.reaching import hang_up_after

Dial = Callable[[], Awaitable[InstanceLine]]
"""Connects to the same incarnation; raises OSError or KvellError when it does not answer."""
HearReady = Callable[[InstanceLine], Awaitable[InstanceFacts | None]]
"""Returns the facts in the first event of a connection, as :func:`.hear_ready` does."""


_Awaited = asyncio.Future[InstanceLine] | asyncio.Future[InstanceFacts | None] | asyncio.Future[int]


class Redial:
    """One attempt to reconnect to a process.

    Looks are counted, not seconds, so that a caller that was itself stopped loses none.

    :param exited: waits for the end of the process, wherever it runs.
    :param look_seconds: time for which a dial is awaited before the next look.
    """

    def __init__(
        self,
        dial: Dial,
        hear_ready: HearReady,
        exited: Callable[[], Awaitable[int]],
        looks: int,
        look_seconds: float,
    ) -> None:
        self._dial, self._hear_ready, self._exited = dial, hear_ready, exited
        self._looks, self._look_seconds = looks, look_seconds
        self._exit: asyncio.Future[int] | None = None

    async def run(self) -> tuple[InstanceLine, InstanceFacts] | None:
        """Return the new connection; None if the process has ended, or is not reached."""
        try:
            while (line := await self._reached()) is not None:
                facts = await self._ready(line)
                if facts is not None:
                    return line, facts
                line.abort()
                await self._wait()
            return None
        finally:
            if self._exit is not None:
                self._exit.cancel()

    @property
    def _has_exited(self) -> bool:
        return self._exit is not None and self._exit.done()

    async def _reached(self) -> InstanceLine | None:
        dialing: asyncio.Future[InstanceLine] | None = None
        try:
            while self._looks > 0 and not self._has_exited:
                self._looks -= 1
                dialing = dialing or asyncio.ensure_future(self._dial())
                await self._wait(dialing)
                # Not earlier: an unreachable machine does not show that the process has ended.
                self._exit = self._exit or asyncio.ensure_future(self._exited())
                if not dialing.done():
                    continue
                try:
                    return dialing.result()
                except (OSError, KvellError):
                    dialing = None
                await self._wait()
            return None
        finally:
            if dialing is not None and not dialing.done():
                hang_up_after(dialing, InstanceLine.abort)

    async def _ready(self, line: InstanceLine) -> InstanceFacts | None:
        """Return the facts, which may follow a long step; None if the instance hangs up."""
        hearing = asyncio.ensure_future(self._hear_ready(line))
        waited: list[_Awaited] = [hearing]
        if self._exit is not None:
            waited.append(self._exit)
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return hearing.result() if hearing.done() else None
        except KvellError:
            self._looks = 0
            return None
        finally:
            hearing.cancel()

    async def _wait(self, *dialing: "asyncio.Future[InstanceLine]") -> None:
        waited: list[_Awaited] = [*dialing]
        if self._exit is not None:
            waited.append(self._exit)
        await asyncio.wait(waited, timeout=self._look_seconds, return_when=asyncio.FIRST_COMPLETED)
