"""The manager's way to the machines of a test; each call is a connection of its own."""

import asyncio
import socket
from collections.abc import Sequence

from kvell.fleet.placing.placement import (
    IncarnationEnd,
    InstancePlace,
    PlacedInstance,
    PlacingError,
)
from kvell.wire.frames import FrameReader
from tests.fleet.faults.machines.orders import READ_BYTES, Order, Reply, What, encoded, reply_of

ANSWER_SECONDS = 5.0


class NodePlacement:
    """A :class:`.Placement`, for the manager's process.

    :param machines: the path of the socket of :class:`Machines`.
    """

    def __init__(self, machines: str) -> None:
        self._machines = machines

    async def find(self) -> list[PlacedInstance]:
        return list((await self._asked("found")).found)

    def enter(self, instance_id: str) -> None:
        self._ask(Order(0, "enter", instance_id), ANSWER_SECONDS)

    def leave(self, instance_id: str) -> None:
        self._ask(Order(0, "leave", instance_id), ANSWER_SECONDS)

    async def start(
        self, instance_id: str, words: Sequence[str], incarnation: int, within_seconds: float
    ) -> InstancePlace:
        order = Order(0, "start", instance_id, incarnation, tuple(words))
        placed = (await asyncio.to_thread(self._ask, order, within_seconds)).placed
        assert placed is not None
        return placed

    async def end_of(self, instance_id: str, incarnation: int) -> IncarnationEnd | None:
        return (await self._asked("ended", instance_id, incarnation)).ended

    async def stop(self, instance_id: str, incarnation: int) -> None:
        await self._asked("stop", instance_id, incarnation)

    async def close(self) -> None:
        await self._asked("close")

    async def _asked(self, what: What, instance_id: str = "", incarnation: int = 0) -> Reply:
        return await asyncio.to_thread(
            self._ask, Order(0, what, instance_id, incarnation), ANSWER_SECONDS
        )

    def _ask(self, order: Order, seconds: float) -> Reply:
        reader, bodies = FrameReader(), list[bytes]()
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(seconds)
                sock.connect(self._machines)
                sock.sendall(encoded(order))
                while not bodies and (data := sock.recv(READ_BYTES)):
                    bodies += reader.feed(data)
        except OSError as error:
            raise PlacingError(f"the machines do not answer ({error})") from error
        if not bodies:
            raise PlacingError("the machines hung up")
        reply = reply_of(bodies[0])
        if reply.problem:
            raise PlacingError(reply.problem)
        return reply
