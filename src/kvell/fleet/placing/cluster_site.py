"""The machines of a cluster as a site: instances are started there and connected over TCP.

::

    manager ── start(incarnation) ──► placement ──► launcher on a machine ──► instance
       └────────── connects to its address, both prove the secret, frames ───────► │
"""

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Iterable, Sequence

from kvell.errors import ChangeSomething
from kvell.fleet.instance.instance_process import (
    DialedLine,
    InstanceProcess,
    InstanceStartError,
    LaunchPlan,
    dial_instance,
    filled_in,
    said_last,
)
from kvell.fleet.manager.messages import MANAGER
from kvell.fleet.placing.placement import (
    IncarnationEnd,
    InstancePlace,
    NoRoomError,
    PlacedInstance,
    Placement,
    PlacingError,
)
from kvell.fleet.started.supervisor import USER_MUST_CHANGE
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import Greeting, new_incarnation

LOOK_SECONDS = 1.0
"""Pause before a placement that did not answer is asked again."""
NAME_BYTES = 4
logger = logging.getLogger(__name__)


END_LOOK_SECONDS = 0.1
"""Pause between two questions whether a process has ended."""
KILL_SECONDS = 5.0
"""A machine that has not confirmed a kill after this time counts as dead."""
KILLED = -int(signal.SIGKILL)


class RemoteProcess:
    """A process of another machine.  For the manager it has ended once its connection is closed.

    The manager does not wait long for a machine that no longer answers: an instance there sees its
    connection end, or the other instances refuse its old incarnation.

    :ivar last_words: last lines of the process on stderr, if the process ended by an error.
    """

    def __init__(
        self, placement: Placement, instance_id: str, incarnation: int, placed: InstancePlace
    ) -> None:
        self._placement, self._instance_id = placement, instance_id
        self._incarnation, self._host = incarnation, placed.host
        self._killing: asyncio.Task[None] | None = None
        self._code: int | None = None
        self.last_words = ""

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
            end_of = self._placement.end_of
            while (ended := await end_of(self._instance_id, self._incarnation)) is None:
                await asyncio.sleep(END_LOOK_SECONDS)
        except PlacingError as error:
            logger.warning("instance %s on %s: %s", self._instance_id, self._host, error)
            return KILLED
        if ended.exit_code > 0 and ended.last_words:
            self.last_words = ended.last_words
            log_last_words(self._instance_id, self._host, ended)
        return ended.exit_code

    async def _stop(self) -> None:
        with contextlib.suppress(PlacingError):  # the machine is dead, and so is the process
            await self._placement.stop(self._instance_id, self._incarnation)


def log_last_words(instance_id: str, host: str, ended: IncarnationEnd) -> None:
    for line in ended.last_words.splitlines():
        logger.error("instance %s on %s wrote: %s", instance_id, host, line)


class ClusterSite:
    """A :class:`.Site` on several machines.

    :param pool: name of the instances' pool; instances of different pools refuse each other.
    :param placing_seconds: time within which a machine takes an instance, and the instance listens.
    """

    def __init__(
        self, placement: Placement, secret: bytes, pool: str, placing_seconds: float = 600.0
    ) -> None:
        self._placement, self._secret, self._pool = placement, secret, pool
        self.enter, self.leave = placement.enter, placement.leave
        self._placing_seconds = placing_seconds
        self._found: dict[str, PlacedInstance] = {}
        # A unique name, so that two managers at one instance do not disconnect each other.
        name = f"{MANAGER}-{secrets.token_hex(NAME_BYTES)}"
        self._greeting = Greeting(name, new_incarnation(), "", 0)

    async def find(self) -> dict[str, int]:
        """Return the instances that an earlier manager has started, with their incarnations.

        A placement that does not answer is asked again: a manager that took a running cluster for a
        new one would start every instance twice.
        """
        while True:
            try:
                instances = await self._placement.find()
                break
            except PlacingError as error:
                logger.warning(
                    "the placement did not report running instances: %s; asking again", error
                )
                await asyncio.sleep(LOOK_SECONDS)
        self._found = {instance.instance_id: instance for instance in instances}
        return {instance.instance_id: instance.incarnation for instance in instances}

    async def rejoin(self, instance_id: str) -> InstanceProcess | None:
        instance = self._found.pop(instance_id, None)
        if instance is None or instance.placed is None:
            return None
        with contextlib.suppress(InstanceStartError):
            return await self._reached(instance_id, instance.incarnation, instance.placed)
        return None

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        values = {
            **plan.values,
            "incarnation": str(plan.incarnation),
            "pool_name": self._pool,
        }
        words = filled_in(command, values)
        try:
            async with asyncio.timeout(self._placing_seconds):
                placed = await self._placement.start(
                    instance_id, words, plan.incarnation, self._placing_seconds
                )
                await self._check_alive(instance_id, plan.incarnation, placed)
                return await self._reached(instance_id, plan.incarnation, placed)
        except NoRoomError as error:
            raise InstanceStartError(str(error), USER_MUST_CHANGE) from error
        except (PlacingError, TimeoutError) as error:
            await self._give_up(instance_id, plan.incarnation)
            problem = str(error) or f"it did not listen within {self._placing_seconds:g} s"
            raise InstanceStartError(f"cannot place {instance_id}: {problem}") from error
        except BaseException:
            await self._give_up(instance_id, plan.incarnation)
            raise

    def check_room(self, contracts: Iterable[tuple[int | None, int]], further: int) -> None:
        """Do nothing: each machine refuses by itself what its memory cannot hold."""

    async def close(self) -> None:
        with contextlib.suppress(PlacingError):  # the cluster has ended before
            await self._placement.close()

    async def _reached(
        self, instance_id: str, incarnation: int, placed: InstancePlace
    ) -> InstanceProcess:
        async def dial() -> DialedLine:
            return await dial_instance(
                placed.address, self._greeting, self._secret, instance_id, incarnation
            )

        try:
            line = await dial()
        except (OSError, ProtocolError, ChangeSomething) as error:
            raise InstanceStartError(f"cannot reach {instance_id}: {error}") from error
        process = RemoteProcess(self._placement, instance_id, incarnation, placed)
        return InstanceProcess(
            placed.pid,
            process.wait,
            process.kill,
            line,
            placed.host,
            placed.address,
            last_words=lambda: process.last_words,
            dial=dial,
        )

    async def _give_up(self, instance_id: str, incarnation: int) -> None:
        with contextlib.suppress(PlacingError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._placement.stop(instance_id, incarnation)

    async def _check_alive(self, instance_id: str, incarnation: int, placed: InstancePlace) -> None:
        """Check that a started instance listens.

        :raises InstanceStartError: when the instance has ended.
        """
        if placed.address:
            return
        ended = await self._placement.end_of(instance_id, incarnation)
        if ended is None:
            raise InstanceStartError("the instance does not listen")
        log_last_words(instance_id, placed.host, ended)
        problem = f"the instance ended before it listened (exit {ended.exit_code})"
        raise InstanceStartError(said_last(problem, ended.last_words), ended.exit_code)
