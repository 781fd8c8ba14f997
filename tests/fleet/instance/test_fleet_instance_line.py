"""The line to an instance: events as they are read, whatever pieces they come in."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import AskStats, Cancel, Command, Drain, Drained, Event, Tokens
from kvell.fleet.instance import instance_process as dialing
from kvell.fleet.instance.instance_process import InstanceLine, dial
from kvell.vocabulary import RequestId
from kvell.wire.frames import FrameReader, ProtocolError, frame
from kvell.wire.greeting import Greeting

T = TypeVar("T")
Told = tuple[Event | None, list[Event]]
GARBAGE = frame(b"abc")


def tokens(index: int) -> Tokens:
    return Tokens(RequestId("a"), 0, index, (index,))


def run(scenario: Callable[[InstanceLine, socket.socket], Awaitable[T]]) -> T:
    """A scenario with a line, and the instance's end of it."""

    async def bounded() -> T:
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            transport, line = await loop.create_unix_connection(InstanceLine, sock=ours)
            try:
                async with asyncio.timeout(10):
                    return await scenario(line, theirs)
            finally:
                transport.close()

    return asyncio.run(bounded())


def unconnected() -> tuple[InstanceLine, list[Event], "asyncio.Task[None]"]:
    line, told = InstanceLine(), list[Event]()
    return line, told, asyncio.ensure_future(line.follow(told.append))


def test_the_first_event_is_taken_off_and_the_others_are_told_in_order() -> None:
    async def scenario(line: InstanceLine, theirs: socket.socket) -> Told:
        theirs.sendall(b"".join(encode_frame(tokens(i)) for i in range(3)))
        first, told = await line.first(), list[Event]()
        following = asyncio.ensure_future(line.follow(told.append))
        await asyncio.sleep(0)
        theirs.sendall(encode_frame(Drained()))
        theirs.shutdown(socket.SHUT_WR)
        await following
        return first, told

    first, told = run(scenario)
    assert first == tokens(0)
    assert told == [tokens(1), tokens(2), Drained()]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 6))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int], count: int) -> None:
    stream = b"".join(encode_frame(tokens(i)) for i in range(count))

    async def scenario() -> list[Event]:
        line, told, following = unconnected()
        await asyncio.sleep(0)
        rest = stream
        for cut in cuts:
            piece, rest = rest[:cut], rest[cut:]
            line.data_received(piece)
        line.data_received(rest)
        line.connection_lost(None)
        await following
        return told

    assert asyncio.run(scenario()) == [tokens(i) for i in range(count)]


async def test_an_event_is_told_before_the_loop_turns() -> None:
    line, told, following = unconnected()
    await asyncio.sleep(0)
    line.data_received(encode_frame(tokens(0)))
    seen = list(told)
    line.connection_lost(None)
    await following
    assert seen == [tokens(0)]


async def test_what_is_not_the_protocol_ends_the_line_and_nothing_behind_it_is_told() -> None:
    line, told, following = unconnected()
    await asyncio.sleep(0)
    line.data_received(encode_frame(tokens(0)) + GARBAGE + encode_frame(tokens(1)))
    line.data_received(encode_frame(tokens(2)))
    with pytest.raises(ProtocolError):
        await following
    assert told == [tokens(0)]


def test_garbage_before_anything_else_is_said_to_whoever_waits_for_the_first() -> None:
    async def scenario(line: InstanceLine, theirs: socket.socket) -> None:
        theirs.sendall(GARBAGE)
        with pytest.raises(ProtocolError):
            await line.first()

    run(scenario)


def test_a_line_that_ends_at_once_has_no_first_event() -> None:
    async def scenario(line: InstanceLine, theirs: socket.socket) -> Event | None:
        theirs.close()
        return await line.first()

    assert run(scenario) is None


def test_commands_arrive_in_order_and_none_is_sent_behind_the_end() -> None:
    sent: list[Command] = [AskStats(), Cancel(RequestId("a")), Drain()]

    async def scenario(line: InstanceLine, theirs: socket.socket) -> bytes:
        for command in sent:
            line.send(command)
        line.hang_up()
        line.send(AskStats())
        await asyncio.sleep(0)
        theirs.settimeout(10)
        received = b""
        while piece := await asyncio.to_thread(theirs.recv, 4096):
            received += piece
        return received

    bodies = FrameReader().feed(run(scenario))
    assert [decode_command(body) for body in bodies] == sent


SECRET = bytes(range(32))
FRONT = Greeting("front", 2, "", 0)
SILENT = 40
"""More than there are threads for what blocks."""


def test_instances_that_do_not_answer_take_no_thread() -> None:
    """As many as a front may know: whatever else it does in threads goes on."""

    async def dials(address: str) -> tuple[int, int]:
        waiting = [
            asyncio.create_task(dial(address, FRONT, SECRET, "commands")) for _ in range(SILENT)
        ]
        await asyncio.sleep(0)  # they have begun
        await asyncio.to_thread(str)
        ended = sum(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        return ended, sum(isinstance(one, asyncio.CancelledError) for one in results)

    with socket.create_server(("127.0.0.1", 0), backlog=2 * SILENT) as silent:
        ended, cancelled = asyncio.run(dials(f"tcp://127.0.0.1:{silent.getsockname()[1]}"))
        silent.setblocking(False)
        came = 0
        while True:
            try:
                sock, _ = silent.accept()
            except BlockingIOError:
                break
            came += 1
            sock.close()
    assert came == SILENT, "the system had taken them in, and nobody answered"
    assert (ended, cancelled) == (0, SILENT)


def test_an_instance_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "GREETING_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError):
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        asyncio.run(dial(address, FRONT, SECRET, "commands"))
