"""The wires of the fault tests: they carry all, know who speaks, lose what is cut, keep back."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvell.fleet.instance.instance_process import dial
from kvell.wire.blocking import BlockingSocket
from kvell.wire.endpoints import endpoint_of, listen_at
from kvell.wire.greeting import Greeting
from tests.fleet.faults.wires import Wires
from tests.front.scenarios import until
from tests.wire.answering import answer_session

SECRET = secrets.token_bytes(32)


@dataclass
class Pair:
    """Both ends of a connection through a door."""

    ours: socket.socket
    theirs: socket.socket


class Answering:
    """Somebody who listens, and meets whoever comes."""

    def __init__(self) -> None:
        self._listener = listen_at("tcp://127.0.0.1:0")
        self._listener.setblocking(True)
        self.address = str(endpoint_of(self._listener))

    def close(self) -> None:
        self._listener.close()

    async def meet(self, door: str, opener: str) -> Pair:
        answers = asyncio.create_task(asyncio.to_thread(self._answer))
        opens = dial(door, Greeting(opener, 1, "", 0), SECRET, "commands")
        (ours, _), theirs = await asyncio.gather(opens, answers)
        theirs.setblocking(False)
        return Pair(ours, theirs)

    def _answer(self) -> socket.socket:
        sock, _ = self._listener.accept()
        answer_session(BlockingSocket(sock), Greeting("mixed-0", 2, "", 0), SECRET, ("commands",))
        return sock


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Wires, str, Answering]]:
    answering = Answering()
    try:
        async with Wires() as wires:
            yield wires, await wires.door("mixed-0", answering.address), answering
    finally:
        answering.close()


async def heard(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (
        piece := await asyncio.get_running_loop().sock_recv(sock, count - len(found))
    ):
        found += piece
    return found


async def test_both_ways_are_carried_and_ends_are_passed_on() -> None:
    async with opened() as (wires, door, answering):
        pair = await answering.meet(door, "front-1")
        [wire] = wires.between("front-*", "mixed-0")
        said = secrets.token_bytes(300_000)
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(pair.ours, said))
        assert await heard(pair.theirs, len(said)) == said
        await sending
        await loop.sock_sendall(pair.theirs, b"back")
        assert await heard(pair.ours, 4) == b"back"
        assert wire.carried_bytes > len(said)
        pair.ours.close()
        assert await heard(pair.theirs, 1) == b""
        pair.theirs.close()
        await until(lambda: not list(wires))


async def test_a_cut_loses_what_is_on_its_way_and_spares_others() -> None:
    async with opened() as (wires, door, answering):
        cut, spared = [await answering.meet(door, name) for name in ("front-1", "manager")]
        cutting = asyncio.create_task(wires.cut("front-*", "mixed-0"))
        await until(lambda: any(one.is_condemned for one in wires))
        cut.theirs.send(b"x" * 1000)
        [wire] = await cutting
        assert (wire.opener, wire.lost_bytes) == ("front-1", 500)
        assert len(await _before_reset(cut.ours)) <= 500
        assert await _before_reset(cut.theirs) == b""
        spared.theirs.send(b"y")
        assert await heard(spared.ours, 1) == b"y"
        for pair in (cut, spared):
            pair.ours.close()
            pair.theirs.close()


async def test_what_is_said_into_silence_comes_when_it_is_over() -> None:
    async with opened() as (wires, door, answering):
        pair = await answering.meet(door, "manager")
        other = await answering.meet(door, "front-1")
        wires.silence("manager", "mixed-*")
        pair.theirs.send(b"late")
        other.theirs.send(b"soon")
        assert await heard(other.ours, 4) == b"soon"
        [wire] = wires.between("manager", "mixed-0")
        await until(lambda: wire.held_bytes == 4)
        with pytest.raises(BlockingIOError):
            pair.ours.recv(1)
        again = asyncio.create_task(answering.meet(door, "manager"))
        await until(lambda: len([one for one in wires if one.held_bytes]) == 2)
        assert not again.done()
        wires.heal()
        assert await heard(pair.ours, 4) == b"late"
        assert wire.held_bytes == 0
        for one in (pair, other, await again):
            one.ours.close()
            one.theirs.close()


async def _before_reset(sock: socket.socket) -> bytes:
    """What comes before a connection is reset; an orderly end would fail."""
    found = b""
    while True:
        try:
            piece = await asyncio.get_running_loop().sock_recv(sock, 4096)
        except ConnectionResetError:
            return found
        assert piece, "the connection ended in order"
        found += piece
