"""A machine of a test as its process is seen from the test."""

import asyncio
import itertools
import sys
from collections.abc import Sequence

from kvell.fleet.placing.placement import PlacingError
from kvell.wire.frames import FrameReader
from tests.fleet.faults.machines.orders import READ_BYTES, ROOT, Order, Reply, encoded, reply_of


class Node:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, secret: bytes, program: Sequence[str]) -> "Node":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fleet.faults.machines.node_process", *program),
            cwd=ROOT,
            stdin=pipe,
            stdout=pipe,
        )
        assert process.stdin is not None
        process.stdin.write(secret)
        return cls(name, process)

    @property
    def is_dead(self) -> bool:
        return self.process.returncode is not None or self._reading.done()

    async def ask(self, order: Order) -> Reply:
        """Let the node carry an order out."""
        if self.is_dead:
            raise PlacingError(f"node {self.name} is dead")
        assert self.process.stdin is not None
        number = next(self._numbers)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        order = Order(number, order.what, order.instance_id, order.incarnation, order.words)
        self.process.stdin.write(encoded(order))
        return await answer

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()
        await self._reading

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        reader = FrameReader()
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(READ_BYTES):
            for body in reader.feed(data):
                reply = reply_of(body)
                self._asked.pop(reply.call).set_result(reply)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(PlacingError(f"node {self.name} has died"))
