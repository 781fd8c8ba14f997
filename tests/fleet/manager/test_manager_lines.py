"""The line to a front: what comes that is not the protocol, and fronts that do not read."""

import asyncio
import struct
from collections.abc import Callable
from zlib import crc32

import pytest

import kvell.fleet.manager.front_lines as front_line
from kvell.fleet.instance.instance_process import dial
from kvell.fleet.manager.messages import (
    Answer,
    DrainInstance,
    FrontBeat,
    Roster,
    encode_message,
)
from kvell.wire.frames import frame
from kvell.wire.greeting import Greeting
from tests.fleet.manager.front_client import (
    SECRET,
    HeldSite,
    joined,
    managed,
    one_front,
)
from tests.fleet.seen import fronts_of, loads_of
from tests.front.scenarios import until

CommandFactory = Callable[..., list[str]]
BEAT = encode_message(FrontBeat({"mixed-0": 3}))


def damaged(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


def announced(length_bytes: int) -> bytes:
    length = length_bytes.to_bytes(4, "little")
    return length + struct.pack("<II", crc32(length), 0)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame(b""),
        frame(b"\x81\xa4type"),
        damaged(BEAT),
        BEAT + damaged(BEAT),
        encode_message(Roster(1, ())),
        encode_message(Answer(1)),
        encode_message(FrontBeat({"mixed-0": -1})),
        encode_message(FrontBeat({}, {"mixed-0": "boss"}, 1)),
        announced(1 << 30),
        announced(2 << 20) + bytes((1 << 20) + 1),
    ],
)
async def test_what_is_not_the_protocol_ends_that_connection_alone(
    instance_command: CommandFactory, words: bytes
) -> None:
    async with (
        managed(instance_command(), site=HeldSite()) as one,
        await joined(one.manager) as front,
        await joined(one.manager, "front-b") as other,
    ):
        await until(lambda: bool(other.rosters))
        front.say_bytes(words)
        await front.hung_up()
        assert (await other.drain("mixed-0")).field == "instances"
        assert not other.is_hung_up
        async with await joined(one.manager) as again:
            await until(lambda: bool(again.rosters))


async def test_messages_come_in_pieces_and_several_at_once(
    instance_command: CommandFactory,
) -> None:
    async with (
        managed(instance_command(), site=HeldSite()) as one,
        await joined(one.manager) as front,
    ):
        orders = b"".join(encode_message(DrainInstance(n, "mixed-0")) for n in range(5))
        for byte in orders[:70]:
            front.say_bytes(bytes([byte]))
            await asyncio.sleep(0)
        front.say_bytes(orders[70:])
        await until(lambda: sorted(front.answers) == [0, 1, 2, 3, 4])


async def test_a_front_that_does_not_read_is_hung_up_on(
    instance_command: CommandFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for one long answer after another; so much memory of ours it does not get."""
    monkeypatch.setattr(front_line, "MOST_WAITING_BYTES", 1 << 16)
    async with one_front(instance_command(), {"mixed": 1}) as (one, front):
        told = Greeting("front-b", 5, "", 0)
        sock, _ = await dial(one.manager.address, told, SECRET, "cluster")
        order = encode_message(DrainInstance(1, "x" * 100_000))
        sock.setblocking(True)

        def asks() -> None:
            while True:
                sock.sendall(order)

        with sock, pytest.raises(ConnectionError):
            await asyncio.to_thread(asks)
        assert (await front.drain("mixed-9")).field == "id"
        assert not front.is_hung_up


async def test_a_front_that_comes_again_replaces_its_earlier_connection(
    instance_command: CommandFactory,
) -> None:
    async with (
        managed(instance_command(), site=HeldSite()) as one,
        await joined(one.manager) as front,
    ):
        front.say(FrontBeat({"mixed-0": 3}))
        manager = one.manager
        await until(lambda: loads_of(manager) == {"mixed-0": 3})
        async with await joined(manager) as again:
            await front.hung_up()
            assert (await again.drain("mixed-0")).field == "instances"
            assert fronts_of(manager).living(0.0) == ["front-a"]
            assert loads_of(manager) == {"mixed-0": 3}


async def test_a_connection_of_a_front_that_comes_late_replaces_none(
    instance_command: CommandFactory,
) -> None:
    """A greeting that was on its way for long is older than what the front has by now."""
    async with (
        managed(instance_command(), site=HeldSite()) as one,
        await joined(one.manager, incarnation=9) as front,
    ):
        await until(lambda: bool(front.rosters))
        async with await joined(one.manager, incarnation=8) as late:
            await late.hung_up()
            assert not late.rosters
        async with await joined(one.manager, incarnation=10) as next_one:
            await front.hung_up()
            await until(lambda: bool(next_one.rosters))
