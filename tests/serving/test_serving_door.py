"""Where fronts come in: the secret from a pipe, proofs, names, and an end when the pipe ends."""

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.mempool.rendezvous import SECRET_BYTES
from kvell.serving.fronts import FrontListener, read_secret
from kvell.wire.blocking import BlockingSocket
from kvell.wire.endpoints import connect_to
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import Greeting
from kvell.wire.session import Purpose, open_session
from tests.depth import few

SECRET = bytes(range(SECRET_BYTES))
WAIT_SECONDS = 20.0
INCARNATION = 1 << 40


@contextmanager
def pipe() -> Iterator[tuple[int, FileIO]]:
    reads, writes = os.pipe()
    try:
        with FileIO(writes, "wb") as end:
            yield reads, end
    finally:
        os.close(reads)


@pytest.fixture
def door() -> Iterator[FrontListener]:
    with FrontListener("127.0.0.1", SECRET, "decode-3", INCARNATION) as door:
        yield door


def come(
    door: FrontListener,
    name: str,
    secret: bytes = SECRET,
    purpose: Purpose = "commands",
    incarnation: int = 5,
) -> tuple[socket.socket, Greeting]:
    sock = connect_to(door.address, WAIT_SECONDS)
    told = Greeting(name, incarnation, "", 0)
    try:
        return sock, open_session(BlockingSocket(sock), told, secret, purpose)
    except BaseException:
        sock.close()
        raise


def rings(door: FrontListener) -> bool:
    return bool(select.select([door.descriptor], [], [], WAIT_SECONDS)[0])


@few()
@given(st.lists(st.integers(1, SECRET_BYTES - 1), max_size=5, unique=True), st.binary(max_size=9))
def test_the_secret_is_what_comes_first(cuts: list[int], more: bytes) -> None:
    edges = [0, *sorted(cuts), SECRET_BYTES]
    with pipe() as (reads, writes):

        def write() -> None:
            for start, end in pairwise(edges):
                writes.write(SECRET[start:end])
            writes.write(more)
            writes.close()

        thread = threading.Thread(target=write)
        thread.start()
        assert read_secret(reads) == SECRET
        thread.join()
        assert os.read(reads, 100) == more


@pytest.mark.parametrize("count", [0, 1, SECRET_BYTES - 1])
def test_half_a_secret_is_none(count: int) -> None:
    with pipe() as (reads, writes):
        writes.write(SECRET[:count])
        writes.close()
        with pytest.raises(ProtocolError, match=f"has {count} of {SECRET_BYTES}"):
            read_secret(reads)


def test_who_comes_in_hears_whose_door_it_is(door: FrontListener) -> None:
    sock, heard = come(door, "front-1")
    with sock:
        assert (heard.instance, heard.incarnation) == ("decode-3", INCARNATION)
        assert rings(door)
        [arrival] = door.arrivals()
        name, arrived = arrival.front, arrival.sock
        with arrived:
            assert name == "front-1"
            arrived.sendall(b"hello")
            assert sock.recv(5) == b"hello"
        assert door.arrivals() == []


def test_several_may_come_at_once(door: FrontListener) -> None:
    names = [f"front-{number}" for number in range(12)]
    threads = [threading.Thread(target=lambda n=name: come(door, n)[0].close()) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived: list[str] = []
    while len(arrived) < len(names):
        assert rings(door)
        for arrival in door.arrivals():
            arrived.append(arrival.front)
            arrival.sock.close()
    assert sorted(arrived) == sorted(names)


@pytest.mark.parametrize(
    ("name", "secret", "purpose"),
    [
        ("front-1", bytes(SECRET_BYTES), "commands"),
        ("front-1", SECRET, "pages"),
        ("front-1", SECRET, "cluster"),
        ("decode-3", SECRET, "commands"),
    ],
)
def test_strangers_stay_out(
    door: FrontListener, name: str, secret: bytes, purpose: Purpose
) -> None:
    """The last is the instance itself, which is no front of it."""
    with pytest.raises((OSError, ProtocolError)):
        come(door, name, secret, purpose, INCARNATION)
    sock, _ = come(door, "front-2")
    with sock:
        assert rings(door)
        [arrival] = door.arrivals()
        found = arrival.front
        arrival.sock.close()
        assert found == "front-2"


@pytest.mark.parametrize("name", ["", "front:1"])
def test_a_name_must_be_a_word(door: FrontListener, name: str) -> None:
    """Requests' ids begin with it."""
    sock, _ = come(door, name)
    with sock:
        sock.settimeout(WAIT_SECONDS)
        assert sock.recv(1) == b""
    assert door.arrivals() == []


def test_a_secret_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="secret"):
        FrontListener("127.0.0.1", b"123", "mixed-0", 1)


def test_the_end_of_a_pipe_is_the_end(door: FrontListener) -> None:
    with pipe() as (reads, writes):
        watching = door.ends_with(reads)
        writes.write(b"words behind the secret change nothing")
        assert not door.is_over
        writes.close()
        assert rings(door)
        watching.join(WAIT_SECONDS)
        assert door.is_over


def test_a_closed_door_leaves_nothing() -> None:
    before = threading.active_count()
    door = FrontListener("127.0.0.1", SECRET, "mixed-0", 1)
    silent = connect_to(door.address, WAIT_SECONDS)
    sock, _ = come(door, "front-1")
    assert rings(door)
    door.close()
    with silent, sock:
        for one in (silent, sock):
            one.settimeout(WAIT_SECONDS)
            assert one.recv(1) == b""
    with pytest.raises(OSError):
        connect_to(door.address, 1.0)
    assert threading.active_count() == before
