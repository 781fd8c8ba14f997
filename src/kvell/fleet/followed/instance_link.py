"""Keeps a front connected to one instance that the manager of its cluster has started.

::

    roster names an incarnation ──► dials, with pauses ──Ready──► up ──ends──► how did it end
                                      ▲                            (the roster says it within 3 s)
                                      └───────────────────────────────────────────────┘

A roster that names another incarnation, or tells how this one ended, ends the connection at once.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvell.engine.protocol.messages import Command, Event, Ready, Tokens
from kvell.errors import InstanceDied, KvellError
from kvell.fleet.instance.death import InstanceDeath
from kvell.fleet.instance.dialing import DialedLine
from kvell.fleet.instance.instance_process import InstanceStartError, hear_ready
from kvell.fleet.instance.reaching import Pauses, hang_up_after, reached
from kvell.fleet.instance.supervisor import InstanceListener, InstanceState
from kvell.fleet.instance.watchdog import Watchdog
from kvell.fleet.manager.messages import RosterEntry
from kvell.wire.frames import ProtocolError

NEWS_SECONDS = 3.0
"""Whoever lost an instance waits so long for the manager's word of how it ended."""

logger = logging.getLogger(__name__)

Dial = Callable[[RosterEntry], Coroutine[Any, Any, DialedLine]]
"""Connects to the incarnation of an entry; raises OSError or KvellError when that cannot be."""


class CutListener(InstanceListener, Protocol):
    """Whoever is told what happens to an instance of a roster; called from the event loop."""

    def instance_cut(self) -> None:
        """The connection ended; ``instance_lost`` follows once it is known why."""


class InstanceLink:
    """From :meth:`start` to :meth:`end`; a :class:`.Handle`.

    :param entry: of the roster.
    :param startup_seconds: an instance that answers must say within this time that it is ready.
    :param silence_seconds: a connection on which nothing comes for so long is ended.
    :ivar problem: why the instance was not reached; "" if it was.
    """

    def __init__(
        self,
        entry: RosterEntry,
        dial: Dial,
        listener: CutListener,
        startup_seconds: float,
        silence_seconds: float,
    ) -> None:
        self._entry, self._dial, self._listener = entry, dial, listener
        self._startup_seconds, self._silence_seconds = startup_seconds, silence_seconds
        self._news = asyncio.Event()
        self._pauses = Pauses()
        self._watchdog = Watchdog(silence_seconds)
        self._line: DialedLine | None = None
        self._incarnation = 0
        self._has_served = self._is_to_be_lost = False
        self._task: asyncio.Task[None] | None = None
        self._reaching: asyncio.Task[tuple[DialedLine, Ready]] | None = None
        self.problem = ""

    @property
    def state(self) -> InstanceState:
        """As the manager says, but only an instance that is reached counts as ``serving``."""
        if self._line is not None:
            return "draining" if self._entry.state == "draining" else "serving"
        if self._entry.state != "serving":
            return self._entry.state
        return "restarting" if self._has_served else "starting"

    @property
    def pid(self) -> int | None:
        """Process id of the instance on its machine; None while it is not reached."""
        return self._entry.pid if self._line is not None and self._entry.pid else None

    @property
    def host(self) -> str:
        """The machine that it runs on."""
        return self._entry.host

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._entry.restarts

    def start(self) -> None:
        """Connect, and connect again, as long as the roster names an incarnation that serves."""
        self._task = asyncio.create_task(self._keep())

    def update(self, entry: RosterEntry) -> None:
        """Take in what a newer roster says."""
        self._entry = entry
        self._news.set()
        if self._line is not None and not self._goes_on():
            self._line.abort()
        if self._reaching is not None and not self._is_named():
            self._reaching.cancel()

    def send(self, command: Command) -> None:
        """Queue a command for the instance.

        :raises InstanceDied: when it is not reached just now.
        :raises ProtocolError: when the command is too long for a frame.
        """
        if self._line is None:
            raise InstanceDied(f"no instance serves just now ({self.state})")
        self._line.send(command)

    def end(self, death: InstanceDeath) -> None:
        """End the connection for good; the listener is told the death if there was one."""
        if self._task is not None:
            self._task.cancel()
        self._lose(death)

    async def ended(self) -> None:
        """Wait until nothing is left, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _goes_on(self) -> bool:
        """Whether the incarnation that was connected to is still the newest, and not dead."""
        entry = self._entry
        is_dead = entry.ended is not None and entry.ended.incarnation == self._incarnation
        return entry.incarnation == self._incarnation and not is_dead

    def _is_named(self) -> bool:
        """Whether that incarnation may be connected to."""
        return self._goes_on() and self._entry.state == "serving" and bool(self._entry.address)

    async def _keep(self) -> None:
        while True:
            if self._incarnation != self._entry.incarnation:
                self._incarnation = self._entry.incarnation
                self._pauses.reset()
            if not self._is_named():
                await self._next_news()
                continue
            found = await self._reached()
            if found is None:
                continue
            line, ready = found
            if self._is_named():
                await self._follow(line, ready)
            else:
                line.abort()

    async def _reached(self) -> tuple[DialedLine, Ready] | None:
        """Connect, however often it takes; None if the roster names the incarnation no more."""
        self._reaching = asyncio.create_task(self._reach())
        try:
            await asyncio.wait([self._reaching])
        except asyncio.CancelledError:
            self._reaching.cancel()
            hang_up_after(self._reaching, lambda found: found[0].abort())
            raise
        found, self._reaching = self._reaching, None
        return None if found.cancelled() else found.result()

    async def _reach(self) -> tuple[DialedLine, Ready]:
        while True:
            await asyncio.sleep(self._pauses.next_seconds())
            try:
                line = await reached(self._dial(self._entry), DialedLine.abort)
                ready = await self._ready(line)
            except (OSError, KvellError) as error:
                if str(error) != self.problem:
                    name = self._entry.instance_id
                    logger.warning("instance %s is not reached: %s", name, error)
                self.problem = str(error)
            else:
                self.problem = ""
                return line, ready

    async def _ready(self, line: DialedLine) -> Ready:
        """What the instance says of itself.

        :raises InstanceStartError: when it hangs up, is late or speaks another version.
        :raises ProtocolError: when it says something that is not the protocol.
        """
        try:
            ready = await hear_ready(line, self._startup_seconds)
        except BaseException:
            line.abort()
            raise
        if ready is None:
            raise InstanceStartError("the instance hung up before it was ready")
        return ready

    async def _follow(self, line: DialedLine, ready: Ready) -> None:
        """Pass events on until the connection ends, and say how the instance ended."""
        self._line, self._has_served, self._is_to_be_lost = line, True, True
        self._watchdog = Watchdog(self._silence_seconds)
        logger.info("instance %s is reached at %s", self._entry.instance_id, self._entry.address)
        self._listener.instance_ready(ready)
        watch = asyncio.create_task(self._watch(line))
        death = InstanceDeath("the connection to the instance was cut", "cut")
        try:
            await line.follow(self._heard)
        except ProtocolError as error:
            death = InstanceDeath(f"the instance broke the protocol: {error}", "protocol")
        finally:
            is_silent = watch.done()
            watch.cancel()
            line.abort()
            self._line = None
        self._listener.instance_cut()
        if is_silent:
            silence = f"the instance gave no sign of life for {self._silence_seconds:g} s"
            death = InstanceDeath(silence, "cut")
        if death.cause == "cut":
            death = await self._explained(death)
        logger.error("instance %s: %s", self._entry.instance_id, death.problem)
        self._lose(death)

    async def _watch(self, line: DialedLine) -> None:
        """End the connection once nothing has come for too long."""
        while not self._watchdog.look():
            await asyncio.sleep(self._watchdog.interval_seconds)
        line.abort()

    def _heard(self, event: Event) -> None:
        self._watchdog.beat()
        if isinstance(event, Tokens):
            self._pauses.reset()
        self._listener.instance_said(event)

    async def _explained(self, death: InstanceDeath) -> InstanceDeath:
        """How the incarnation ended, as the manager says in time; else what we know ourselves."""
        loop = asyncio.get_running_loop()
        until_seconds = loop.time() + NEWS_SECONDS
        while True:
            ended = self._entry.ended
            if ended is not None and ended.incarnation == self._incarnation:
                return InstanceDeath(ended.problem, ended.cause)
            if self._entry.state == "draining":
                return InstanceDeath("the instance was taken out of service", "drained")
            if not self._goes_on():
                return death
            try:
                async with asyncio.timeout_at(until_seconds):
                    await self._next_news()
            except TimeoutError:
                return death

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _lose(self, death: InstanceDeath) -> None:
        """Tell the listener once for each time that it was told :class:`Ready`."""
        self._line = None
        if self._is_to_be_lost:
            self._is_to_be_lost = False
            self._listener.instance_lost(death)
