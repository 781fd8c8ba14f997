"""The machines of a cluster as a place for instances: started there, connected over TCP.

::

    front ── start(incarnation) ──► placer ──► keeper on a machine ──► instance
      ▲                                                                   │
      └────────────── connects, both prove the secret, frames ────────────┘
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterable, Sequence

from kvell.server.instance.instance_line import InstanceLine
from kvell.server.instance.instance_process import (
    InstanceProcess,
    InstanceStartError,
    LaunchPlan,
    filled_in,
)
from kvell.server.placing.entrance import Entrance
from kvell.server.placing.placer import Placed, Placer, PlacingError
from kvell.server.placing.remote_process import KILL_SECONDS, RemoteProcess, tell_last_words

LOOK_SECONDS = 0.5
"""Between two looks whether an instance ended before it connected."""
POOL_BYTES = 8


class ClusterSite:
    """A :class:`.Site` on several machines.

    :param entrance: where instances connect; opened at the first start.
    :param placing_seconds: a machine must take an instance, and the instance connect, within this
        time.
    """

    def __init__(self, placer: Placer, entrance: Entrance, placing_seconds: float = 600.0) -> None:
        self._placer, self._entrance = placer, entrance
        self._placing_seconds = placing_seconds
        self._pool = f"kvell-{secrets.token_hex(POOL_BYTES)}"
        self._is_open = False

    def enter(self, instance_id: str) -> None:
        """See :class:`.Site`."""
        self._placer.enter(instance_id)

    def leave(self, instance_id: str) -> None:
        """See :class:`.Site`."""
        self._placer.leave(instance_id)

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        """See :class:`.Site`."""
        if not self._is_open:
            self._is_open = True
            self._entrance.open()
        values = {
            **plan.values,
            "incarnation": str(plan.incarnation),
            "pool_name": self._pool,
        }
        words = filled_in(command, values)
        arrives = self._entrance.expect(instance_id, plan.incarnation)
        try:
            async with asyncio.timeout(self._placing_seconds):
                placed = await self._placer.start(
                    instance_id, words, plan.incarnation, self._placing_seconds
                )
                sock = await self._arrived(arrives, instance_id, plan.incarnation, placed)
            _, line = await asyncio.get_running_loop().create_connection(InstanceLine, sock=sock)
        except (PlacingError, TimeoutError, OSError) as error:
            await self._give_up(arrives, instance_id, plan.incarnation)
            problem = str(error) or f"it did not connect within {self._placing_seconds:g} s"
            raise InstanceStartError(f"cannot place {instance_id}: {problem}") from error
        except BaseException:
            await self._give_up(arrives, instance_id, plan.incarnation)
            raise
        process = RemoteProcess(self._placer, instance_id, plan.incarnation, placed)
        return InstanceProcess(process, line, placed.host)

    def check_room(self, contracts: Iterable[tuple[int | None, int]], further: int) -> None:
        """See :class:`.Site`.  Each machine refuses by itself what its memory cannot hold."""

    async def close(self) -> None:
        """See :class:`.Site`."""
        await self._entrance.close()
        with contextlib.suppress(PlacingError):  # the cluster has ended before
            await self._placer.close()

    async def _give_up(
        self, arrives: "asyncio.Future[socket.socket]", instance_id: str, incarnation: int
    ) -> None:
        """Leave nothing of an incarnation that nobody waits for any more."""
        if not arrives.cancel() and not arrives.cancelled():
            arrives.result().close()
        with contextlib.suppress(PlacingError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._placer.stop(instance_id, incarnation)

    async def _arrived(
        self,
        arrives: "asyncio.Future[socket.socket]",
        instance_id: str,
        incarnation: int,
        placed: Placed,
    ) -> socket.socket:
        """The connection of an instance that was started.

        :raises InstanceStartError: when it ends before.
        """
        while True:
            done, _ = await asyncio.wait([arrives], timeout=LOOK_SECONDS)
            if done:
                return arrives.result()
            ended = await self._placer.ended(instance_id, incarnation)
            if ended is not None and not arrives.done():
                tell_last_words(instance_id, placed.host, ended)
                problem = f"the instance ended before it connected (exit {ended.exit_code})"
                raise InstanceStartError(problem, ended.exit_code)
