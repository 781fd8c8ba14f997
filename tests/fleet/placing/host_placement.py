"""A placement without Ray: its machines are launchers of this process."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from kvell.fleet.placing.launcher import Launcher
from kvell.fleet.placing.placement import (
    IncarnationEnd,
    InstancePlace,
    PlacedInstance,
    PlacingError,
)

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_instance.py"))


class HostPlacement:
    """Starts each instance under a launcher.

    :param program: what the launchers run.
    :ivar lost: instances whose machine does not answer.
    :ivar started: name and incarnation of every start, in order.
    """

    def __init__(
        self, secret: bytes, program: Sequence[str] = FAKE, host: str = "127.0.0.1"
    ) -> None:
        self._secret, self._program, self._host = secret, program, host
        self._launchers: dict[str, Launcher] = {}
        self.lost: set[str] = set()
        self.left: list[str] = []
        self.started: list[tuple[str, int]] = []
        self.is_closed = False

    def enter(self, instance_id: str) -> None:
        self._launchers[instance_id] = Launcher(self._secret, self._host, 1, self._program)

    async def find(self) -> list[PlacedInstance]:
        return [
            PlacedInstance(name, *(launcher.runs() or (0, None)))
            for name, launcher in self._launchers.items()
        ]

    def leave(self, instance_id: str) -> None:
        self.left.append(instance_id)
        self._launchers.pop(instance_id).close()

    def unleash(self, instance_id: str) -> None:
        child = self._launchers[instance_id]._child
        assert child is not None
        child.hang_up()

    async def start(
        self, instance_id: str, words: Sequence[str], incarnation: int, within_seconds: float
    ) -> InstancePlace:
        launcher = self._reached(instance_id)
        self.started.append((instance_id, incarnation))
        return await asyncio.to_thread(launcher.start, words, incarnation)

    async def end_of(self, instance_id: str, incarnation: int) -> IncarnationEnd | None:
        return await asyncio.to_thread(self._reached(instance_id).end_of, incarnation)

    async def stop(self, instance_id: str, incarnation: int) -> None:
        await asyncio.to_thread(self._reached(instance_id).stop, incarnation)

    async def close(self) -> None:
        self.is_closed = True
        for launcher in self._launchers.values():
            await asyncio.to_thread(launcher.close)

    def _reached(self, instance_id: str) -> Launcher:
        if instance_id in self.lost or instance_id not in self._launchers:
            raise PlacingError("its machine does not answer")
        return self._launchers[instance_id]
