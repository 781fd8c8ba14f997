"""Where others come in: by purpose, in time, and past any number of silent strangers."""

import contextlib
import errno
import logging
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.wire.blocking import BlockingSocket
from kvell.wire.doorway import MOST_STRANGERS, PAUSE_SECONDS, Doorway
from kvell.wire.endpoints import connect_to, listen_at
from kvell.wire.frames import HEADER_BYTES, FrameReader, ProtocolError, frame
from kvell.wire.greeting import VERSION, Greeting
from kvell.wire.session import NONCE_BYTES, Hello, Purpose, open_session
from tests.depth import some
from tests.mempool.filled import NAME
from tests.mempool.pools import SECRET as POOL_SECRET
from tests.patience import until
from tests.wire.hostile import HOSTILE, LATIN

PATIENCE_SECONDS = 30.0
SECRET = secrets.token_bytes(32)
TOLD, OTHER = Greeting("here", 1, "", 0), Greeting("there", 2, "", 0)


class Hall:
    """A doorway, and who came in through it."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self.came: list[tuple[Purpose, str, socket.socket]] = []
        self.doorway = Doorway(
            listener or listen_at("tcp://127.0.0.1:0"),
            TOLD,
            SECRET,
            {"messages": self._taker("messages"), "pages": self._taker("pages")},
            most_strangers=3,
            greeting_seconds=2.0,
        )
        self.doorway.open()

    def _taker(self, purpose: Purpose) -> Callable[[Greeting, socket.socket], None]:
        def take(heard: Greeting, sock: socket.socket) -> None:
            if heard.instance == "unwanted":
                raise ProtocolError("it is not needed")
            self.came.append((purpose, heard.instance, sock))

        return take

    def connected(self, source: str = "") -> socket.socket:
        return connect_to(self.doorway.address, PATIENCE_SECONDS, source)

    def met(self, purpose: Purpose = "messages", told: Greeting = OTHER) -> socket.socket:
        sock = self.connected()
        open_session(BlockingSocket(sock), told, SECRET, purpose)
        sock.settimeout(PATIENCE_SECONDS)
        return sock

    def heard_strangers(self, count: int) -> bool:
        return self.doorway.strangers == count

    def close(self) -> None:
        self.doorway.close()
        for _, _, sock in self.came:
            sock.close()


@pytest.fixture
def hall() -> Iterator[Hall]:
    one = Hall()
    yield one
    one.close()


def hung_up_on(sock: socket.socket) -> bool:
    sock.settimeout(PATIENCE_SECONDS)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_are_handed_over_by_their_purpose(hall: Hall) -> None:
    purposes: tuple[Purpose, ...] = ("pages", "messages", "pages")
    with ExitStack() as stack:
        ends = [stack.enter_context(hall.met(purpose)) for purpose in purposes]
        until(lambda: len(hall.came) == 3)
        assert [purpose for purpose, _, _ in hall.came] == list(purposes)
        for end, (_, name, sock) in zip(ends, hall.came, strict=True):
            assert name == "there"
            end.sendall(b"hello")
            sock.settimeout(PATIENCE_SECONDS)
            assert sock.recv(5) == b"hello"


@pytest.mark.parametrize("purpose", ["commands", "cluster"])
def test_what_is_not_served_here_is_refused(hall: Hall, purpose: Purpose) -> None:
    with hall.connected() as sock, pytest.raises(ProtocolError, match="closed the connection"):
        open_session(BlockingSocket(sock), OTHER, SECRET, purpose)
    assert hall.came == []


def test_whom_the_taker_does_not_want_is_hung_up_on(hall: Hall) -> None:
    with hall.met(told=Greeting("unwanted", 3, "", 0)) as sock:
        assert hung_up_on(sock)
    hall.met().close()
    until(lambda: len(hall.came) == 1)


def test_the_oldest_stranger_makes_way(hall: Hall) -> None:
    with ExitStack() as stack:
        silent = []
        for count in range(1, 4):
            silent.append(stack.enter_context(hall.connected()))
            until(partial(hall.heard_strangers, count))
        with hall.met():
            until(lambda: len(hall.came) == 1)
        assert hung_up_on(silent[0])
        assert hall.doorway.strangers == 2


def test_an_address_of_many_strangers_makes_way_to_others(hall: Hall) -> None:
    """Though the only one of another address is the oldest."""
    with ExitStack() as stack:
        alone = stack.enter_context(hall.connected(source="127.0.0.9"))
        until(partial(hall.heard_strangers, 1))
        many = []
        for count in (2, 3):
            many.append(stack.enter_context(hall.connected()))
            until(partial(hall.heard_strangers, count))
        with hall.met():
            until(lambda: len(hall.came) == 1)
        assert hung_up_on(many[0])
        open_session(BlockingSocket(alone), OTHER, SECRET, "messages")
        until(lambda: len(hall.came) == 2)


def test_the_time_counts_from_the_moment_of_accepting(hall: Hall) -> None:
    """A byte now and then gives a stranger no further time."""
    with hall.connected() as sock:
        started = time.monotonic()
        sock.settimeout(0.05)
        with pytest.raises((ConnectionError, EOFError)):
            while True:
                sock.sendall(b"\0")
                try:
                    if not sock.recv(1):
                        raise EOFError
                except TimeoutError:
                    assert time.monotonic() < started + PATIENCE_SECONDS
    assert hall.doorway.strangers == 0


class Short(socket.socket):
    """A listener of a process that has no descriptor left, for a while."""

    is_short, tries = True, 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.is_short:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_without_descriptors_it_pauses_and_lets_in_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Short(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    hall = Hall(listener)
    started = time.monotonic()
    with hall.connected() as sock:
        until(lambda: listener.tries >= 4)
        assert listener.tries <= (time.monotonic() - started) / PAUSE_SECONDS + 2, "it spins"
        assert len(caplog.records) == 1, "it says so once"
        listener.is_short = False
        open_session(BlockingSocket(sock), OTHER, SECRET, "messages")
        until(lambda: len(hall.came) == 1)
    hall.close()


def test_a_closed_doorway_leaves_nothing() -> None:
    before = threading.active_count()
    hall = Hall()
    with hall.connected() as silent, hall.met() as sock:
        until(lambda: len(hall.came) == 1)
        until(lambda: hall.doorway.strangers == 1)
        hall.doorway.close()
        hall.doorway.close()  # once more does nothing
        assert hung_up_on(silent)
        hall.came[0][2].sendall(b"x")  # what was handed over stays
        assert sock.recv(1) == b"x"
    hall.close()
    with pytest.raises(OSError, match="refused"):
        hall.connected()
    assert threading.active_count() == before


@contextmanager
def filled(folder: Path, transport: str) -> Iterator[Path | str]:
    """The address of a pool in another process."""
    command = [sys.executable, "-m", "tests.mempool.filled", str(folder), transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline().decode().strip()
        yield said if transport == "tcp" else Path(said)
        process.kill()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_silent_connections_lock_nobody_out(tmp_path: Path, transport: str) -> None:
    """More than are heard at once, and all of them stay."""
    with filled(tmp_path, transport) as address, ExitStack() as stack:
        for _ in range(MOST_STRANGERS + 16):
            stack.enter_context(connect_to(address, PATIENCE_SECONDS))
        with connect_to(address, PATIENCE_SECONDS) as sock:
            told = Greeting("member", 1, "", 4096, port=1)
            assert (
                open_session(BlockingSocket(sock), told, POOL_SECRET, "messages").instance == NAME
            )


HELLO = msgspec.msgpack.encode(Hello(VERSION, "messages", bytes(NONCE_BYTES)))

FIELDS = ("version", "purpose", "nonce", "release")


def hello_with(field: str, value: bytes) -> bytes:
    """The first words with one field of other bytes."""
    told = msgspec.msgpack.decode(HELLO, type=dict[str, msgspec.Raw])
    return msgspec.msgpack.encode(told | {field: msgspec.Raw(value)})


def spoken(hall: Hall, *frames: bytes) -> bytes:
    """Say something at a doorway; returns what it answered before it hung up."""
    heard = b""
    with hall.connected() as sock:
        sock.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(OSError):  # it hung up before it had read everything
            for frame in frames:
                sock.sendall(frame)
                if frame is not frames[-1]:
                    heard += sock.recv(4096)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(4096):
                heard += piece
    return heard


def assert_lets_in(hall: Hall) -> None:
    before = len(hall.came)
    with hall.met():
        until(lambda: len(hall.came) > before)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_whatever_the_first_words_are(hall: Hall, body: bytes) -> None:
    assert spoken(hall, frame(body)) == b""
    assert_lets_in(hall)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [bytes((0xA0 | len(LATIN),)) + LATIN, b"\xc0", b"\x91\x01"])
def test_whatever_a_field_of_them_is(hall: Hall, field: str, value: bytes) -> None:
    assert spoken(hall, frame(hello_with(field, value))) == b""
    assert_lets_in(hall)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_whatever_follows_them(hall: Hall, body: bytes) -> None:
    answered = spoken(hall, frame(HELLO), frame(body))
    [hello] = FrameReader().feed(answered)
    assert msgspec.msgpack.decode(hello, type=Hello).purpose == "messages"
    assert_lets_in(hall)


@pytest.fixture(scope="module")
def long_open() -> Iterator[Hall]:
    one = Hall()
    yield one
    one.close()


@pytest.mark.hypothesis
@some()
@given(at=st.integers(0, 400), bits=st.integers(1, 255), cut=st.integers(1, 400))
def test_first_words_with_flipped_bits_or_cut(
    long_open: Hall, at: int, bits: int, cut: int
) -> None:
    body = bytearray(HELLO[:cut])
    body[at % len(body)] ^= bits
    spoken(long_open, frame(bytes(body)))
    assert_lets_in(long_open)


@pytest.mark.hypothesis
@some()
@given(noise=st.binary(min_size=1, max_size=3 * HEADER_BYTES))
def test_bytes_that_are_no_frame(long_open: Hall, noise: bytes) -> None:
    spoken(long_open, noise)
    assert_lets_in(long_open)


def test_a_fault_of_ours_keeps_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    came: list[str] = []

    def enters(heard: Greeting, sock: socket.socket) -> None:
        came.append(heard.instance)
        sock.close()
        if len(came) == 1:
            raise ZeroDivisionError("a mistake of this program")

    listener = listen_at("tcp://127.0.0.1:0")
    doorway = Doorway(listener, TOLD, SECRET, {"messages": enters})
    doorway.open()
    try:
        with caplog.at_level(logging.ERROR):
            for name in ("first", "second"):
                enter(doorway, Greeting(name, secrets.randbits(32), "", 0))
        assert came == ["first", "second"]
        assert "internal error in the handshake" in caplog.text
        assert "a mistake of this program" in caplog.text
    finally:
        doorway.close()


def enter(doorway: Doorway, told: Greeting) -> None:
    """Prove to be somebody, and wait until the connection ends."""
    with connect_to(doorway.address, PATIENCE_SECONDS) as sock:
        open_session(BlockingSocket(sock), told, SECRET, "messages")
        sock.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
