"""Where instances come in over TCP: who is let in, who is not, and that nobody holds it up."""

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvell.mempool.transports.tcp.challenge as challenge
import kvell.server.placing.entrance as entrance_module
from kvell.engine.protocol.front_link import reach_front
from kvell.errors import ChangeSomething, TryLater
from kvell.frames import HEADER_BYTES, ProtocolError, framed
from kvell.mempool.transports.endpoints import connect_to
from kvell.mempool.transports.greeting import Greeting
from kvell.mempool.transports.tcp.challenge import Purpose, open_session
from kvell.mempool.transports.tcp.channel import Channel
from kvell.server.placing.entrance import Entrance
from tests.server.front.scenarios import run, until

SECRET, OTHER = secrets.token_bytes(32), secrets.token_bytes(32)


@asynccontextmanager
async def opened(secret: bytes = SECRET) -> AsyncIterator[Entrance]:
    entrance = Entrance("127.0.0.1", secret)
    entrance.open()
    try:
        yield entrance
    finally:
        await entrance.close()


async def reached(
    entrance: Entrance, name: str = "mixed-0", incarnation: int = 7, secret: bytes = SECRET
) -> socket.socket:
    return await asyncio.to_thread(reach_front, entrance.address, secret, name, incarnation)


async def ends(sock: socket.socket) -> bool:
    """Whether the other side hangs up, perhaps behind some words."""
    sock.settimeout(20)
    try:
        while await asyncio.to_thread(sock.recv, 4096):
            pass
    except ConnectionResetError:
        return True
    return True


async def is_open_for_others(entrance: Entrance) -> None:
    """An instance that is expected is let in."""
    arrives = entrance.expect("decode-1", 99)
    with await reached(entrance, "decode-1", 99) as theirs, await arrives as ours:
        ours.setblocking(True)
        theirs.sendall(b"x")
        assert await asyncio.to_thread(ours.recv, 1) == b"x"
    await until(lambda: entrance.strangers == 0)


def test_who_is_expected_is_let_in_and_bytes_flow_both_ways() -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            arrives = [entrance.expect(f"mixed-{n}", n + 1) for n in range(3)]
            theirs = await asyncio.gather(
                *(reached(entrance, f"mixed-{n}", n + 1) for n in (2, 0, 1))
            )
            ours = await asyncio.gather(*arrives)
            for sock, number in zip(theirs, (2, 0, 1), strict=True):
                sock.sendall(bytes([number]))
            for number, sock in enumerate(ours):
                assert not sock.getblocking()
                sock.setblocking(True)
                assert sock.recv(1) == bytes([number])
                sock.sendall(b"back")
                sock.close()
            for sock in theirs:
                assert sock.recv(4) == b"back"
                sock.close()

    run(scenario())


def test_who_does_not_know_the_secret_stays_out() -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            arrives = entrance.expect("mixed-0", 7)
            with pytest.raises(ProtocolError, match="hung up"):
                await reached(entrance, secret=OTHER)
            assert not arrives.done()
            await is_open_for_others(entrance)
            (await reached(entrance)).close()  # the right one still comes in
            (await arrives).close()

    run(scenario())


def test_a_front_that_does_not_know_the_secret_is_left() -> None:
    """The instance hears no proof, since it fails its own first; an echo proves nothing."""

    async def scenario() -> None:
        async with opened(OTHER) as entrance:
            with pytest.raises(ProtocolError):
                await reached(entrance)
        echo = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{echo.getsockname()[1]}"

        def mirror() -> None:
            sock, _ = echo.accept()
            with sock:
                while piece := sock.recv(4096):
                    sock.sendall(piece)

        mirroring = asyncio.create_task(asyncio.to_thread(mirror))
        with echo, pytest.raises(ProtocolError):
            await asyncio.to_thread(reach_front, address, SECRET, "mixed-0", 1)
        await mirroring

    run(scenario())


@pytest.mark.parametrize("awaited", [("mixed-0", 8), ("mixed-1", 7)])
def test_another_incarnation_or_instance_is_hung_up_on(awaited: tuple[str, int]) -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            arrives = entrance.expect(*awaited)
            with await reached(entrance) as theirs:
                assert await ends(theirs)
            assert not arrives.done()

    run(scenario())


def test_who_is_given_up_does_not_come_in_any_more_and_nobody_comes_twice() -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            entrance.expect("mixed-0", 7).cancel()
            with await reached(entrance) as theirs:
                assert await ends(theirs)
            arrives = entrance.expect("mixed-0", 7)
            first = await reached(entrance)
            (await arrives).close()
            with await reached(entrance) as second:
                assert await ends(second)
            first.close()

    run(scenario())


@pytest.mark.parametrize("purpose", ["messages", "pages"])
def test_instances_have_nothing_to_say_to_each_other_here(purpose: Purpose) -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            arrives = entrance.expect("mixed-0", 7)

            def opens() -> NoReturn:
                with connect_to(entrance.address, 10) as sock:
                    open_session(Channel(sock), Greeting("mixed-0", 7, "", 0), SECRET, purpose)
                raise AssertionError("it was let in")

            with pytest.raises(ProtocolError, match="hung up"):
                await asyncio.to_thread(opens)
            assert not arrives.done()

    run(scenario())


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(
        st.binary(min_size=1, max_size=200),
        st.binary(max_size=100).map(framed),
        st.integers(0, (1 << 32) - 1).map(lambda size: struct.pack("<III", size, 0, 0)),
    )
)
def test_garbage_is_hung_up_on(garbage: bytes) -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            with await asyncio.to_thread(connect_to, entrance.address, 10) as sock:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                assert await ends(sock)
            await is_open_for_others(entrance)

    run(scenario())


@pytest.mark.parametrize("words", [b"", b"x" * (HEADER_BYTES - 1)])
def test_who_hangs_is_hung_up_on_and_others_are_let_in_meanwhile(
    words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(challenge, "GREETING_SECONDS", 1.0)

    async def scenario() -> None:
        async with opened() as entrance:
            with await asyncio.to_thread(connect_to, entrance.address, 10) as sock:
                sock.sendall(words)
                await until(lambda: entrance.strangers == 1)
                arrives = entrance.expect("decode-1", 99)
                with await reached(entrance, "decode-1", 99):
                    (await arrives).close()
                assert await ends(sock)
            await until(lambda: entrance.strangers == 0)

    run(scenario())


def test_strangers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance_module, "MOST_STRANGERS", 3)

    async def scenario() -> None:
        async with opened() as entrance:
            silent = [await asyncio.to_thread(connect_to, entrance.address, 10) for _ in range(3)]
            await until(lambda: entrance.strangers == 3)
            with await asyncio.to_thread(connect_to, entrance.address, 10) as one_more:
                assert await ends(one_more)
            for sock in silent:
                sock.close()
            await until(lambda: entrance.strangers == 0)
            await is_open_for_others(entrance)

    run(scenario())


def test_at_the_end_nobody_waits_and_nobody_is_let_in() -> None:
    async def scenario() -> None:
        async with opened() as entrance:
            arrives = entrance.expect("mixed-0", 7)
            silent = await asyncio.to_thread(connect_to, entrance.address, 10)
            await until(lambda: entrance.strangers == 1)
        assert arrives.cancelled()
        with silent:
            assert await ends(silent)
        with pytest.raises(TryLater, match="no front answers"):
            await reached(entrance)
        await entrance.close()  # once more does nothing

    run(scenario())


def test_a_short_secret_and_an_address_of_others_are_refused() -> None:
    with pytest.raises(ChangeSomething, match="secret"):
        Entrance("127.0.0.1", b"short")
    with pytest.raises(ChangeSomething, match="cannot be bound"):
        Entrance("203.0.113.1", SECRET)
