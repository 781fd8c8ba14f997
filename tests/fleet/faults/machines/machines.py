"""Machines that outlive a manager, without Ray: nodes as processes, and who knows what runs where.

::

    manager process                test process                     nodes, processes
      NodePlacement ── Unix socket ──► Machines ── stdin, stdout ──► Launcher ──► instance
                                       └─ a door (wires.py) in front of each instance

``Machines`` does what Ray's own records do: it says what is placed already, and when a node has
died it places its instances on another.
"""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvell.fleet.placing.placement import InstancePlace, PlacedInstance, PlacingError
from kvell.wire.frames import FrameReader
from tests.fleet.faults.machines.nodes import Node
from tests.fleet.faults.machines.orders import READ_BYTES, Order, Reply, encoded, order_of
from tests.fleet.faults.wires import Wires
from tests.fleet.placing.ray_machines import is_gone


@dataclass
class _Place:
    """Where an instance is, if it is anywhere; ``placed`` names the door in front of it."""

    node: Node | None = None
    incarnation: int = 0
    placed: InstancePlace | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Machines:
    """``async with Machines(wires, secret, folder, 2) as machines``.

    :param program: what nodes run as an instance.
    :ivar started: name and incarnation of every start, in order.
    :ivar starting: instances that do not listen yet.
    :ivar pids: of every instance that was started, and every node.
    """

    def __init__(
        self, wires: Wires, secret: bytes, folder: Path, nodes: int, program: Sequence[str]
    ) -> None:
        self._wires, self._secret, self._first_nodes = wires, secret, nodes
        self._program = program
        self.socket = str(folder / "machines")
        self._names = itertools.count()
        self._nodes: list[Node] = []
        self._places: dict[str, _Place] = {}
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.started: list[tuple[str, int]] = []
        self.starting: set[str] = set()
        self.pids: list[int] = []
        self.was_closed = False

    async def __aenter__(self) -> "Machines":
        for _ in range(self._first_nodes):
            await self.add_node()
        self._server = await asyncio.start_unix_server(self._met, self.socket)
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for node in self._nodes:
            await node.end()

    @property
    def nodes(self) -> list[Node]:
        return [one for one in self._nodes if not one.is_dead]

    def incarnations(self) -> dict[str, int]:
        return dict(self.started)

    def pid_of(self, instance_id: str) -> int:
        placed = self._places[instance_id].placed
        assert placed is not None
        return placed.pid

    def strays(self) -> list[int]:
        places = [place.placed for place in self._places.values()]
        wanted = {one.pid for one in places if one is not None}
        wanted |= {node.process.pid for node in self.nodes}
        return [pid for pid in self.pids if pid not in wanted and not is_gone(pid)]

    def placed_on(self, node: Node) -> dict[str, int]:
        """Instances of a node, with their process ids."""
        return {
            name: place.placed.pid
            for name, place in self._places.items()
            if place.node is node and place.placed is not None
        }

    async def add_node(self) -> Node:
        node = await Node.start(f"node-{next(self._names)}", self._secret, self._program)
        self._nodes.append(node)
        self.pids.append(node.process.pid)
        return node

    async def kill_node(self, node: Node, *, with_all: bool) -> dict[str, int]:
        """Kill a node, as when somebody kills its agent, or with all that runs there.

        :returns: its instances, with their process ids.
        """
        there = self.placed_on(node)
        if with_all:
            for pid in there.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await node.kill()
        return there

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry an order out, even if whoever gave it dies meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        frames, bodies = FrameReader(), list[bytes]()
        try:
            while not bodies and (data := await reader.read(READ_BYTES)):
                bodies += frames.feed(data)
            if bodies:
                reply = await self._replied(order_of(bodies[0]))
                with contextlib.suppress(OSError):
                    writer.write(encoded(reply))
                    await writer.drain()
        finally:
            writer.close()
            self._serving.discard(task)

    async def _replied(self, order: Order) -> Reply:
        try:
            return await self._carry_out(order)
        except PlacingError as error:
            return Reply(order.call, problem=str(error))

    async def _carry_out(self, order: Order) -> Reply:
        if order.what == "found":
            return Reply(
                order.call, found=tuple([await self._found(one) for one in list(self._places)])
            )
        if order.what == "close":
            self.was_closed = True
            for name in list(self._places):
                await self._leave(name)
            return Reply(order.call)
        if order.what == "leave":
            await self._leave(order.instance_id)
            return Reply(order.call)
        if order.what == "enter":
            self._places[order.instance_id] = _Place()
            return Reply(order.call)
        place = self._places.get(order.instance_id)
        if place is None:
            raise PlacingError(f"{order.instance_id} runs on no machine")
        if order.what != "start":
            return await self._node_of(place).ask(order)
        async with place.lock:
            return await self._start(place, order)

    async def _found(self, name: str) -> PlacedInstance:
        place = self._places[name]
        if place.placed is None:
            return PlacedInstance(name)
        order = Order(0, "ended", name, place.incarnation)
        if (await self._node_of(place).ask(order)).ended is not None:
            return PlacedInstance(name)
        return PlacedInstance(name, place.incarnation, place.placed)

    async def _start(self, place: _Place, order: Order) -> Reply:
        node = self._node_of(place)
        if place.placed is not None and place.incarnation == order.incarnation:
            return Reply(order.call, placed=place.placed)
        self._nothing_at(place)
        self.starting.add(order.instance_id)
        try:
            reply = await node.ask(order)
        finally:
            self.starting.discard(order.instance_id)
        real = reply.placed
        if real is None:
            return reply
        self.started.append((order.instance_id, order.incarnation))
        self.pids.append(real.pid)
        door = await self._wires.door(order.instance_id, real.address) if real.address else ""
        place.incarnation = order.incarnation
        place.placed = InstancePlace(real.host, real.pid, door)
        return Reply(order.call, placed=place.placed)

    async def _leave(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        async with place.lock:
            self._nothing_at(place)
            if place.node is not None and not place.node.is_dead:
                with contextlib.suppress(PlacingError):
                    await place.node.ask(Order(0, "leave", name))

    def _nothing_at(self, place: _Place) -> None:
        """An incarnation is no more; nobody else gets through its door."""
        if place.placed is not None and place.placed.address:
            self._wires.close_door(place.placed.address)
        place.placed = None

    def _node_of(self, place: _Place) -> Node:
        """Where an instance is; if its node has died, where it will be from now on."""
        if place.node is None or place.node.is_dead:
            alive = self.nodes
            if not alive:
                raise PlacingError("no node is left")
            self._nothing_at(place)
            nodes = [one.node for one in self._places.values()]
            place.node = min(alive, key=nodes.count)
        return place.node
