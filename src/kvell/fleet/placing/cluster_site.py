"""The machines of a cluster as a site: instances are started there and connected over TCP.

::

    manager ── start(incarnation) ──► placement ──► launcher on a machine ──► instance
       └────────── connects to its address, both prove the secret, frames ───────► │
"""

import asyncio
import contextlib
import logging
import secrets
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
from kvell.fleet.instance.supervisor import USER_MUST_CHANGE
from kvell.fleet.manager.messages import MANAGER
from kvell.fleet.placing.placement import (
    InstancePlace,
    NoRoomError,
    PlacedInstance,
    Placement,
    PlacingError,
)
from kvell.fleet.placing.remote_process import KILL_SECONDS, RemoteProcess, log_last_words
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import Greeting, new_incarnation

LOOK_SECONDS = 1.0
"""Pause before a placement that did not answer is asked again."""
NAME_BYTES = 4
logger = logging.getLogger(__name__)


class ClusterSite:
    """A :class:`.Site` on several machines.

    :param secret: of the cluster.
    :param pool: name of the instances' pool; instances of different pools refuse each other.
    :param placing_seconds: time within which a machine takes an instance, and the instance listens.
    """

    def __init__(
        self, placement: Placement, secret: bytes, pool: str, placing_seconds: float = 600.0
    ) -> None:
        self._placement, self._secret, self._pool = placement, secret, pool
        self._placing_seconds = placing_seconds
        self._found: dict[str, PlacedInstance] = {}
        # A unique name, so that two managers at one instance do not disconnect each other.
        name = f"{MANAGER}-{secrets.token_hex(NAME_BYTES)}"
        self._greeting = Greeting(name, new_incarnation(), "", 0)

    def enter(self, instance_id: str) -> None:
        self._placement.enter(instance_id)

    def leave(self, instance_id: str) -> None:
        self._placement.leave(instance_id)

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
        """Connect to the incarnation that was found; return None if that is not possible."""
        instance = self._found.pop(instance_id, None)
        if instance is None or instance.placed is None:
            return None
        with contextlib.suppress(InstanceStartError):
            return await self._reached(instance_id, instance.incarnation, instance.placed)
        return None

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        """Start an incarnation on a machine of the cluster, and connect to it."""
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
        """Connect to an incarnation.

        :raises InstanceStartError: when the incarnation does not answer, or another one does.
        """

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
            process,
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
