"""Where fronts come in: who is let in, who is not, and that nobody holds it up."""

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.fleet.instance.instance_process import dial
from kvell.fleet.manager import manager as manager_module
from kvell.fleet.manager.manager import ManagerFrontListener
from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import connect_to
from kvell.wire.frames import HEADER_BYTES, ProtocolError, frame
from kvell.wire.greeting import Greeting
from kvell.wire.session import Purpose
from tests.depth import few
from tests.front.scenarios import run, until

SECRET, OTHER = secrets.token_bytes(32), secrets.token_bytes(32)
TOLD = Greeting("manager", 7, "of-these-settings", 0)


@dataclass
class Opened:
    entered: list[tuple[str, socket.socket]] = field(default_factory=list)
    door: ManagerFrontListener = field(init=False)

    async def enters(self, front: Greeting, sock: socket.socket) -> None:
        self.entered.append((front.instance, sock))

    async def dialed(
        self,
        name: str = "front-a",
        secret: bytes = SECRET,
        purpose: Purpose = "cluster",
        fingerprint: str = TOLD.fingerprint,
    ) -> tuple[socket.socket, Greeting]:
        told = Greeting(name, 3, fingerprint, 0)
        return await dial(self.door.address, told, secret, purpose)

    async def lets_others_in(self) -> None:
        sock, met = await self.dialed("front-z")
        with sock:
            assert (met.instance, met.incarnation) == ("manager", 7)
            await until(lambda: any(name == "front-z" for name, _ in self.entered))
        await until(lambda: self.door.strangers == 0)


@asynccontextmanager
async def opened() -> AsyncIterator[Opened]:
    one = Opened()
    one.door = ManagerFrontListener("127.0.0.1", 0, TOLD, SECRET, one.enters)
    one.door.open()
    try:
        yield one
    finally:
        await one.door.close()
        for _, sock in one.entered:
            sock.close()


async def ends(sock: socket.socket) -> bool:
    """Whether the other side hangs up, perhaps behind some words."""
    sock.settimeout(20)
    try:
        while await asyncio.to_thread(sock.recv, 4096):
            pass
    except ConnectionResetError:
        return True
    return True


async def test_fronts_come_in_and_bytes_flow_both_ways() -> None:
    async with opened() as one:
        names = ["front-c", "front-a", "front-b"]
        theirs = await asyncio.gather(*(one.dialed(name) for name in names))
        await until(lambda: len(one.entered) == 3)
        ours = dict(one.entered)
        for name, (sock, met) in zip(names, theirs, strict=True):
            assert met.fingerprint == TOLD.fingerprint
            assert not ours[name].getblocking()
            ours[name].setblocking(True)
            sock.setblocking(True)
            sock.sendall(name.encode())
            assert ours[name].recv(7) == name.encode()
            ours[name].sendall(b"back")
            assert sock.recv(4) == b"back"
            sock.close()


async def test_who_does_not_know_the_secret_stays_out() -> None:
    async with opened() as one:
        with pytest.raises(ProtocolError, match="closed the connection"):
            await one.dialed(secret=OTHER)
        assert not one.entered
        await one.lets_others_in()


@pytest.mark.parametrize("purpose", ["commands", "messages", "pages"])
async def test_who_wants_something_else_stays_out(purpose: Purpose) -> None:
    async with opened() as one:
        with pytest.raises(ProtocolError, match="closed the connection"):
            await one.dialed(purpose=purpose)
        assert not one.entered
        await one.lets_others_in()


async def test_a_front_with_other_settings_hears_of_ours_and_stays_out() -> None:
    async with opened() as one:
        sock, met = await one.dialed(fingerprint="of-other-settings")
        with sock:
            assert met.fingerprint == TOLD.fingerprint
            assert await ends(sock)
        assert not one.entered
        await one.lets_others_in()


@few()
@given(
    st.one_of(
        st.binary(min_size=1, max_size=200),
        st.binary(max_size=100).map(frame),
        st.integers(0, (1 << 32) - 1).map(lambda size: struct.pack("<III", size, 0, 0)),
    )
)
def test_garbage_stays_out(garbage: bytes) -> None:
    async def scenario() -> None:
        async with opened() as one:
            with await asyncio.to_thread(connect_to, one.door.address, 10) as sock:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                assert await ends(sock)
            await one.lets_others_in()

    run(scenario())


@pytest.mark.parametrize("words", [b"", b"x" * (HEADER_BYTES - 1)])
async def test_who_hangs_is_hung_up_on_and_others_come_in_meanwhile(
    words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "Doorway", partial(Doorway, greeting_seconds=1.0))
    async with opened() as one:
        with await asyncio.to_thread(connect_to, one.door.address, 10) as sock:
            sock.sendall(words)
            await until(lambda: one.door.strangers == 1)
            (await one.dialed())[0].close()
            await until(lambda: len(one.entered) == 1)
            assert await ends(sock)
        await until(lambda: one.door.strangers == 0)


async def test_strangers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "Doorway", partial(Doorway, most_strangers=3))
    async with opened() as one:
        address = one.door.address
        silent = [await asyncio.to_thread(connect_to, address, 10) for _ in range(3)]
        await until(lambda: one.door.strangers == 3)
        with await asyncio.to_thread(connect_to, address, 10):
            assert await ends(silent[0])
            await until(lambda: one.door.strangers == 3)  # the newcomer is in its place
            (await one.dialed())[0].close()  # who knows the secret comes in all the same
        for sock in silent:
            sock.close()
        await until(lambda: one.door.strangers == 0)
        await one.lets_others_in()


async def test_at_the_end_nobody_is_let_in() -> None:
    async with opened() as one:
        silent = await asyncio.to_thread(connect_to, one.door.address, 10)
        await until(lambda: one.door.strangers == 1)
    with silent:
        assert await ends(silent)
    with pytest.raises(OSError, match="refused"):
        await one.dialed()
    await one.door.close()  # once more does nothing


def test_a_short_secret_and_an_address_of_others_are_refused() -> None:
    one = Opened()
    with pytest.raises(ChangeSomething, match="secret"):
        ManagerFrontListener("127.0.0.1", 0, TOLD, b"short", one.enters)
    with pytest.raises(ChangeSomething, match="cannot be bound"):
        ManagerFrontListener("203.0.113.1", 0, TOLD, SECRET, one.enters)
