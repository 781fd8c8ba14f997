"""Keeps one instance process alive.

::

    starting ──Ready──► serving ──instance ends──► restarting ──Ready──► serving
        │                  │                            └─ attempts used up ──► failed
        └─ not ready ──► (raises)                 close(), from any ──► closing
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from kvell.engine.protocol.codec import ProtocolError
from kvell.engine.protocol.messages import Command, Drain, Event, Ready, Tokens
from kvell.errors import InstanceDied
from kvell.server.instance.death import InstanceDeath, ended
from kvell.server.instance.instance_process import InstanceProcess, InstanceStartError
from kvell.server.instance.restart import RestartPolicy

logger = logging.getLogger(__name__)

FrontState = Literal["starting", "serving", "restarting", "failed", "closing"]


class InstanceListener(Protocol):
    """Whoever is told what happens to the instance; called from the event loop."""

    def instance_ready(self, ready: Ready) -> None:
        """An incarnation can serve."""
        ...

    def instance_said(self, event: Event) -> None:
        """An event after Ready."""
        ...

    def instance_lost(self, death: InstanceDeath) -> None:
        """The incarnation is gone and will say nothing more."""
        ...

    def instance_given_up(self) -> None:
        """No further incarnation will come."""
        ...


class Supervisor:
    """Starts the instance, follows it, starts it again when it dies."""

    def __init__(
        self,
        command: Sequence[str],
        listener: InstanceListener,
        policy: RestartPolicy,
        startup_seconds: float,
    ) -> None:
        self._command = tuple(command)
        self._listener = listener
        self._policy = policy
        self._startup_seconds = startup_seconds
        self._fruitless_restarts = 0
        self._process: InstanceProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self.state: FrontState = "starting"
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the serving instance; None while there is none."""
        return self._process.pid if self._process and self.state == "serving" else None

    async def start(self) -> None:
        """Start the first incarnation and wait until it is ready.

        :raises InstanceStartError: when it does not become ready.
        """
        process = await self._launch()
        self._task = asyncio.create_task(self._supervise(process))

    def send(self, command: Command) -> None:
        """Queue a command for the serving instance.

        :raises InstanceDied: when none serves just now.
        :raises ProtocolError: when the command is too long for a frame.
        """
        if self._process is None or self.state != "serving":
            raise InstanceDied(f"no instance serves just now ({self.state})")
        self._process.send(command)

    async def close(self, drain_seconds: float) -> None:
        """Drain a serving instance within the deadline, then end it."""
        drains = self.state == "serving"
        self.state = "closing"
        if self._task is None or self._process is None:
            return
        if drains:
            self._process.send(Drain())
            await asyncio.wait([self._task], timeout=drain_seconds)
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._process.kill()
        self._listener.instance_lost(InstanceDeath("the server is shutting down", "closing"))

    async def _launch(self) -> InstanceProcess:
        process = await InstanceProcess.launch(self._command, self.restarts)
        try:
            ready = await process.wait_ready(self._startup_seconds)
        except BaseException:
            await process.kill()
            raise
        self._process = process
        self.state = "serving"
        logger.info("instance %d is ready (pid %d)", self.restarts, process.pid)
        self._listener.instance_ready(ready)
        return process

    async def _supervise(self, process: InstanceProcess) -> None:
        following: InstanceProcess | None = process
        while following is not None:
            death = await self._follow(following)
            if self.state == "closing":
                return
            self.state = "restarting"
            logger.error("%s; restarting", death.problem)
            self._listener.instance_lost(death)
            following = await self._relaunch()

    async def _follow(self, process: InstanceProcess) -> InstanceDeath:
        """Pass events on until the instance ends; says how it ended."""
        try:
            await process.follow(self._heard)
        except ProtocolError as error:
            await process.kill()
            return InstanceDeath(f"the instance broke the protocol: {error}", "protocol")
        return ended(await process.end())

    def _heard(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._fruitless_restarts = 0
        self._listener.instance_said(event)

    async def _relaunch(self) -> InstanceProcess | None:
        while (pause := self._policy.pause_seconds(self._fruitless_restarts)) is not None:
            await asyncio.sleep(pause)
            self.restarts += 1
            self._fruitless_restarts += 1
            with contextlib.suppress(InstanceStartError, ProtocolError):
                return await self._launch()
            logger.error("restart %d of the instance failed", self.restarts)
        self.state = "failed"
        logger.error("the instance cannot be restarted; giving up")
        self._listener.instance_given_up()
        return None
