"""An instance's way to its front: the secret from a pipe, and an end when the pipe ends."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvell.engine.protocol.front_link as front_link
import kvell.mempool.transports.tcp.challenge as challenge
from kvell.engine.protocol.front_link import hang_up_at_end, reach_front, read_secret
from kvell.engine.protocol.instance import serve_instance
from kvell.errors import TryLater
from kvell.frames import ProtocolError
from kvell.mempool.place import SECRET_BYTES
from kvell.mempool.transports.greeting import Greeting
from kvell.mempool.transports.tcp.challenge import answer_session
from kvell.mempool.transports.tcp.channel import Channel
from kvell.testing.instance import FakeEngine

SECRET = bytes(range(SECRET_BYTES))


@contextmanager
def pipe() -> Iterator[tuple[int, FileIO]]:
    """What is read, and a file of the other end, which may be closed before."""
    reads, writes = os.pipe()
    try:
        with FileIO(writes, "wb") as end:
            yield reads, end
    finally:
        os.close(reads)


@settings(max_examples=30)
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


def test_the_front_hears_who_it_is() -> None:
    heard: list[tuple[str, Greeting]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def front() -> None:
            sock, _ = listener.accept()
            with sock:
                told = Greeting("front", 5, "", 0)
                heard.append(answer_session(Channel(sock), told, SECRET, ("commands",)))

        thread = threading.Thread(target=front)
        thread.start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        reach_front(address, SECRET, "decode-3", 1 << 40).close()
        thread.join()
    [(purpose, told)] = heard
    assert (purpose, told.instance, told.incarnation) == ("commands", "decode-3", 1 << 40)


def test_a_front_that_is_not_there_or_says_nothing_is_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(challenge, "GREETING_SECONDS", 0.3)
        with pytest.raises(TryLater, match="does not answer"):
            reach_front(address, SECRET, "mixed-0", 1)
    monkeypatch.setattr(front_link, "GREETING_SECONDS", 0.3)
    with pytest.raises(TryLater, match="no front answers at"):
        reach_front(address, SECRET, "mixed-0", 1)


def test_an_instance_ends_when_its_pipe_does() -> None:
    """Whatever runs: the loop sees its front hang up."""
    ours, theirs = socket.socketpair()
    with pipe() as (reads, writes), ours, theirs:
        watching = hang_up_at_end(reads, theirs)
        serving = threading.Thread(target=serve_instance, args=(FakeEngine(), theirs))
        serving.start()
        assert ours.recv(1)
        writes.write(b"words behind the secret change nothing")
        assert ours.recv(1)
        writes.close()
        serving.join(20)
        assert not serving.is_alive()
        watching.join(20)
        assert not watching.is_alive()


def test_a_pipe_that_ends_after_the_connection_does_no_harm() -> None:
    ours, theirs = socket.socketpair()
    with pipe() as (reads, writes), ours:
        watching = hang_up_at_end(reads, theirs)
        theirs.close()
        writes.close()
        watching.join(20)
        assert not watching.is_alive()
