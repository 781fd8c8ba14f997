"""Strangers that say anything: they are hung up on, and whoever comes next gets in."""

import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.wire.blocking import BlockingSocket
from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import connect_to, listen_at
from kvell.wire.frames import HEADER_BYTES, FrameReader, frame
from kvell.wire.greeting import VERSION, Greeting
from kvell.wire.session import NONCE_BYTES, Hello, open_session
from tests.depth import some
from tests.wire.test_wire_decoding import HOSTILE, LATIN
from tests.wire.test_wire_doorway import PATIENCE_SECONDS, SECRET, TOLD, Hall, hall, until

__all__ = ["hall"]
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
