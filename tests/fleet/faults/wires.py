"""TCP proxies between fronts, manager and instances, whose connections can be cut and silenced.

Whoever opens a connection says who it is in its second frame, behind its hello.  So one door in
front of an instance, or of the manager, tells the wires of all that come through it apart::

    front-3f ──┐
    front-a0 ──┼──► door of mixed-0 ──► mixed-0
    manager ───┘
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import msgspec

from kvell.wire.frames import FrameReader, ProtocolError
from kvell.wire.greeting import Greeting

READ_BYTES = 64 << 10
AT_ONCE = struct.pack("ii", 1, 0)
"""Closing a socket that lingers for no time resets its connection."""
HELLO_AND_GREETING = 2


@dataclass(eq=False)
class Wire:
    """One connection through a door.

    :param to: whom the door belongs to.
    :ivar opener: who opened it; "" before it said so.
    :ivar carried_bytes: that went through, both ways.
    :ivar lost_bytes: that were on their way when it was cut.
    :ivar held_bytes: that are kept back while it is silent.
    """

    to: str
    opener: str = ""
    carried_bytes: int = 0
    lost_bytes: int = 0
    held_bytes: int = 0
    is_condemned: bool = False
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _first: FrameReader | None = field(default_factory=FrameReader)
    _bodies: list[bytes] = field(default_factory=list)

    def listen(self, data: bytes) -> None:
        """Find out who opened it."""
        if self._first is None:
            return
        try:
            self._bodies += self._first.feed(data)
            if len(self._bodies) >= HELLO_AND_GREETING:
                self.opener = msgspec.msgpack.decode(self._bodies[1], type=Greeting).instance
                self._first = None
        except (ProtocolError, msgspec.DecodeError):
            self._first = None


class Wires:
    """All doors of a test; ``async with Wires() as wires``.  Ends are named by patterns."""

    def __init__(self) -> None:
        self._doors: dict[str, asyncio.Server] = {}
        self._wires: dict[Wire, asyncio.Task[None]] = {}
        self._silent: set[tuple[str, str]] = set()

    async def __aenter__(self) -> "Wires":
        return self

    async def __aexit__(self, *_error: object) -> None:
        for address in list(self._doors):
            self.close_door(address)
        tasks = list(self._wires.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __iter__(self) -> Iterator[Wire]:
        return iter(list(self._wires))

    async def door(self, to: str, address: str) -> str:
        """Listen for somebody who listens at an address; where that is."""

        def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire = Wire(to)
            self._wires[wire] = asyncio.create_task(self._carry(wire, address, reader, writer))

        server = await asyncio.start_server(met, "127.0.0.1", 0)
        door = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._doors[door] = server
        return door

    def close_door(self, door: str) -> None:
        """Let nobody else in; who is in stays."""
        self._doors.pop(door).close()

    def between(self, opener: str, to: str) -> list[Wire]:
        return [one for one in self if fnmatchcase(one.opener, opener) and fnmatchcase(one.to, to)]

    async def cut(self, opener: str, to: str) -> list[Wire]:
        """Reset all connections between two ends, each in the middle of what is said next."""
        cut = self.between(opener, to)
        for wire in cut:
            wire.is_condemned = True
        for wire in cut:
            await wire.ended.wait()
        return cut

    def silence(self, opener: str, to: str) -> None:
        """Let nothing through between two ends, on open connections and on later ones.

        Connections stay open, and what is said is kept back, as while packets are lost.
        """
        self._silent.add((opener, to))
        self._open_or_close()

    def heal(self) -> None:
        """Let everything through again, that first which was kept back."""
        self._silent.clear()
        self._open_or_close()

    def _open_or_close(self) -> None:
        for wire in self:
            if self._is_silent(wire):
                wire.flows.clear()
            else:
                wire.flows.set()

    def _is_silent(self, wire: Wire) -> bool:
        return any(
            fnmatchcase(wire.opener, opener) and fnmatchcase(wire.to, to)
            for opener, to in self._silent
        )

    async def _carry(
        self, wire: Wire, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        parts = urlsplit(address)
        ends = [writer]
        try:
            there, answer = await asyncio.open_connection(parts.hostname, parts.port)
            ends.append(answer)
            wire.flows.set()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(wire, reader, answer, from_opener=True))
                both.create_task(self._pump(wire, there, writer))
        except (OSError, ExceptionGroup):  # one end reset it, or it was cut
            pass
        finally:
            for end in ends:
                _reset(end)
            wire.ended.set()
            del self._wires[wire]

    async def _pump(
        self,
        wire: Wire,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        from_opener: bool = False,
    ) -> None:
        while True:
            data, problem = await _said(reader)
            if from_opener:
                wire.listen(data)
            if self._is_silent(wire):
                wire.flows.clear()
            wire.held_bytes += len(data)
            await wire.flows.wait()  # an end of the connection is not heard before either
            wire.held_bytes -= len(data)
            if problem is not None:
                raise problem
            if not data:
                break
            if wire.is_condemned:
                said = data[: len(data) // 2]
                writer.write(said)
                wire.lost_bytes += len(data) - len(said)
                raise ConnectionResetError("it was cut")
            wire.carried_bytes += len(data)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


async def _said(reader: asyncio.StreamReader) -> tuple[bytes, OSError | None]:
    try:
        return await reader.read(READ_BYTES), None
    except OSError as problem:
        return b"", problem


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close one end; a reset if anything was on its way."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    writer.transport.abort()
