"""The connection of a front to one instance, which the manager of its cluster has started.

::

    roster names an incarnation ──► dials, with pauses ──Ready──► up ──ends──► why did it end
                                      ▲                            (the roster has it within 3 s)
                                      └───────────────────────────────────────────────┘

A roster that names another incarnation, or reports this one's end, closes the connection.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvell.cluster.routed_request import InstanceDeath
from kvell.engine.protocol.messages import Command, Event, Tokens
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import InstanceDied, KvellError
from kvell.fleet.fleet import Handle, InstanceState, Member
from kvell.fleet.instance.instance_process import (
    DialedLine,
    InstanceStartError,
    Pauses,
    hang_up_after,
    hear_ready,
    reach,
)
from kvell.fleet.manager.messages import RosterEntry
from kvell.fleet.started.supervisor import Watchdog
from kvell.wire.frames import ProtocolError

NEWS_SECONDS = 3.0
"""Time for which a front that lost an instance waits for the manager to report the cause."""

logger = logging.getLogger(__name__)

Dial = Callable[[RosterEntry], Coroutine[Any, Any, DialedLine]]
"""Connects to the incarnation of an entry; raises OSError or KvellError if it cannot."""


class InstanceLink:
    """A connection to an instance from :meth:`start` to :meth:`end`; a :class:`.Handle`.

    :param startup_seconds: time within which an instance that answers must send ``Ready``.
    :param silence_seconds: a connection that is silent for this long is closed.
    :ivar problem: why the last attempt to connect failed; "" if it did not.
    """

    def __init__(
        self,
        entry: RosterEntry,
        dial: Dial,
        listener: Member[Handle],
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
        self._reaching: asyncio.Task[tuple[DialedLine, InstanceFacts]] | None = None
        self.problem = ""

    @property
    def state(self) -> InstanceState:
        if self._line is not None:
            return "draining" if self._entry.state == "draining" else "serving"
        if self._entry.state != "serving":
            return self._entry.state
        return "restarting" if self._has_served else "starting"

    @property
    def pid(self) -> int | None:
        return self._entry.pid if self._line is not None and self._entry.pid else None

    @property
    def host(self) -> str:
        return self._entry.host

    @property
    def restarts(self) -> int:
        return self._entry.restarts

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    def update(self, entry: RosterEntry) -> None:
        self._entry = entry
        self._news.set()
        if self._line is not None and not self._goes_on():
            self._line.abort()
        if self._reaching is not None and not self._is_named():
            self._reaching.cancel()

    def send(self, command: Command) -> None:
        if self._line is None:
            raise InstanceDied(f"no instance serves now ({self.state})")
        self._line.send(command)

    def end(self, death: InstanceDeath) -> None:
        """Close the connection for good; report ``death`` if the loss is not reported yet."""
        if self._task is not None:
            self._task.cancel()
        self._lose(death)

    async def wait_ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    def _goes_on(self) -> bool:
        entry = self._entry
        is_dead = entry.ended is not None and entry.ended.incarnation == self._incarnation
        return entry.incarnation == self._incarnation and not is_dead

    def _is_named(self) -> bool:
        return self._goes_on() and self._entry.state == "serving" and bool(self._entry.address)

    async def _keep(self) -> None:
        while True:
            if self._incarnation != self._entry.incarnation:
                self._incarnation = self._entry.incarnation
                self._pauses.reset()
            if not self._is_named():
                await self._next_news()
                continue
            connection = await self._reached()
            if connection is None:
                continue
            line, facts = connection
            if self._is_named():
                await self._follow(line, facts)
            else:
                line.abort()

    async def _reached(self) -> tuple[DialedLine, InstanceFacts] | None:
        self._reaching = asyncio.create_task(self._reach())
        try:
            await asyncio.wait([self._reaching])
        except asyncio.CancelledError:
            self._reaching.cancel()
            hang_up_after(self._reaching, lambda connection: connection[0].abort())
            raise
        attempt, self._reaching = self._reaching, None
        return None if attempt.cancelled() else attempt.result()

    async def _reach(self) -> tuple[DialedLine, InstanceFacts]:
        while True:
            await asyncio.sleep(self._pauses.next_seconds())
            try:
                line = await reach(self._dial(self._entry), DialedLine.abort)
                facts = await self._ready(line)
            except (OSError, KvellError) as error:
                if str(error) != self.problem:
                    name = self._entry.instance_id
                    logger.warning("cannot reach instance %s: %s", name, error)
                self.problem = str(error)
            else:
                self.problem = ""
                return line, facts

    async def _ready(self, line: DialedLine) -> InstanceFacts:
        try:
            facts = await hear_ready(line, self._startup_seconds)
        except BaseException:
            line.abort()
            raise
        if facts is None:
            raise InstanceStartError("the instance closed the connection before it was ready")
        return facts

    async def _follow(self, line: DialedLine, facts: InstanceFacts) -> None:
        self._line = line
        self._has_served = True
        self._is_to_be_lost = True
        self._watchdog = Watchdog(self._silence_seconds)
        logger.info("connected to instance %s at %s", self._entry.instance_id, self._entry.address)
        self._listener.instance_ready(facts)
        try:
            ending = await self._watchdog.follow(line, self._on_event, line.abort)
        finally:
            line.abort()
            self._line = None
        self._listener.instance_cut()
        if isinstance(ending, ProtocolError):
            death = InstanceDeath(f"the instance broke the protocol: {ending}", "protocol")
        else:
            problem = "the connection to the instance was cut"
            if ending:
                problem = f"the instance sent nothing for {self._silence_seconds:g} s"
            death = await self._explained(InstanceDeath(problem, "cut"))
        logger.error("instance %s: %s", self._entry.instance_id, death.problem)
        self._lose(death)

    def _on_event(self, event: Event) -> None:
        self._watchdog.beat()
        if isinstance(event, Tokens):
            self._pauses.reset()
        self._listener.instance_said(event)

    async def _explained(self, death: InstanceDeath) -> InstanceDeath:
        """Return the incarnation's end as the manager reports it in time, or else ``death``."""
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
        self._line = None
        if self._is_to_be_lost:
            self._is_to_be_lost = False
            self._listener.instance_lost(death)
