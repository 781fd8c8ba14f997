"""What strangers get of a pool's memory: nothing; and members what was offered to them."""

import array
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.rendezvous import PageTransport
from kvell.mempool.transfers.numbers import SLOTS
from kvell.mempool.transports.page_copies import Piece
from kvell.mempool.transports.rights import Extent, Rights, RightsOfPeer
from kvell.mempool.transports.tcp.tcp_pages import ReadEnded, ReadPages, Reply, pack
from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.descriptors import exchange_descriptors
from kvell.wire.endpoints import connect_to
from kvell.wire.frames import frame
from kvell.wire.greeting import VERSION, Greeting
from kvell.wire.session import NONCE_BYTES, Hello, open_session
from tests.mempool.filled import NAME
from tests.mempool.pools import SECRET
from tests.mempool.transports.owners import GRANTED, Owner, pages_at

PATIENCE_SECONDS = 30.0
MEMBER = Greeting("member", 1, "", 4096, port=1)
REPLIES: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)


@contextmanager
def filled(folder: Path, transport: PageTransport) -> Iterator[str]:
    """The address of a pool in a process of its own."""
    command = [sys.executable, "-m", "tests.mempool.filled", str(folder), transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.kill()


def all_that_comes(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Bytes and descriptors until the other side hangs up."""
    sock.settimeout(PATIENCE_SECONDS)
    said, fds = b"", array.array("i")
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(4096, socket.CMSG_SPACE(16 * fds.itemsize))
        except ConnectionResetError:
            return said, fds.tolist()
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(content)
        if not data:
            return said, fds.tolist()
        said += data


@pytest.mark.parametrize(
    "knows",
    [
        "the words, not the secret",
        # Whoever says too little is hung up on after five seconds.
        *(pytest.param(one, marks=pytest.mark.long) for one in ("nothing", "the first word")),
    ],
)
def test_a_stranger_gets_no_descriptor_of_the_pool(tmp_path: Path, knows: str) -> None:
    with filled(tmp_path, "memory"), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / NAME))
        if knows != "nothing":
            hello = Hello(VERSION, "messages", b"n" * NONCE_BYTES)
            sock.sendall(frame(msgspec.msgpack.encode(hello)))
        if knows == "the words, not the secret":
            sock.sendall(frame(msgspec.msgpack.encode(MEMBER)))
        said, descriptors = all_that_comes(sock)
        assert descriptors == []
        assert NAME.encode() not in said, "it says who it is to strangers"


def test_a_member_can_read_the_pool_and_cannot_write_it(tmp_path: Path) -> None:
    with filled(tmp_path, "memory"), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / NAME))
        told = open_session(BlockingSocket(sock), MEMBER, SECRET, "messages")
        own = os.memfd_create("kvell-member"), os.memfd_create("kvell-member")
        descriptors = exchange_descriptors(sock, own, PATIENCE_SECONDS)
        assert told.instance == NAME
        for descriptor in descriptors:
            size_bytes = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ) as memory:
                assert len(memory) == size_bytes > 0
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, size_bytes)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(descriptor, b"x")
        for descriptor in (*descriptors, *own):
            os.close(descriptor)


@pytest.fixture(scope="module")
def filled_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with filled(tmp_path_factory.mktemp("filled"), "tcp") as address:
        yield address


@pytest.mark.parametrize("number", [0, 1, SLOTS, -SLOTS, 2**63 - 1])
def test_a_member_reads_no_page_that_nobody_offered(filled_at: str, number: int) -> None:
    channel = BlockingSocket(connect_to(filled_at, PATIENCE_SECONDS))
    open_session(channel, MEMBER, SECRET, "pages")
    look = within(PATIENCE_SECONDS)
    channel.say(ReadPages(number, pack([(0, 4096)])), look)
    reply = channel.hear(REPLIES, 4096, look)
    channel.close()
    assert isinstance(reply, ReadEnded) and reply.problem


@pytest.mark.parametrize(
    ("piece", "comes"),
    [
        (Piece(256, 0, 256), True),
        (Piece(300, 0, 212), True),
        (Piece(1024, 0, 512), True),
        (Piece(255, 0, 10), False),
        (Piece(500, 0, 13), False),
        (Piece(512, 0, 1), False),
        (Piece(300, 0, 1000), False),
        (Piece(0, 0, 1), False),
        (Piece(1536, 0, 1), False),
    ],
)
def test_a_transfer_gives_the_pages_that_it_offered_and_no_others(
    piece: Piece, comes: bool
) -> None:
    with Owner(4096) as owner:
        owner.rights.revoke(GRANTED)
        owner.rights.grant(GRANTED, "puller", [(256, 256), (1024, 512)])
        pages, target = pages_at(owner.port), np.zeros(4096, np.uint8)
        problem = pages.bring(GRANTED, [Piece(256, 4000, 1), piece], target, _never())
        pages.close()
        assert (problem == "") == comes
        assert target.any() == comes


def test_another_member_cannot_use_a_right() -> None:
    with Owner(4096) as owner:
        owner.names = ["another"]
        pages, target = pages_at(owner.port), np.zeros(4096, np.uint8)
        problem = pages.bring(GRANTED, [Piece(0, 0, 10)], target, _never())
        assert "not offered" in problem and not target.any()
        pages.close()


spans = st.lists(st.integers(1, 40), max_size=12).map(
    lambda gaps: [(sum(gaps[: i + 1]), gaps[i] // 2 + 1) for i in range(len(gaps) - 1)][::2]
)


@given(spans, st.lists(st.tuples(st.integers(-5, 300), st.integers(1, 60)), max_size=4))
def test_covered_is_what_lies_inside_one_span(granted: list[Extent], asked: list[Extent]) -> None:
    rights = Rights()
    rights.grant(3, "b", granted)
    inside = all(
        any(begin <= at and at + size <= begin + length for begin, length in granted)
        for at, size in asked
    )
    assert rights.covers(3, "b", asked) == inside
    assert not rights.covers(3, "c", asked) and not rights.covers(4, "b", asked)
    rights.revoke(3)
    assert not rights.covers(3, "b", asked)
    rights.close()


def test_an_empty_word_is_nobodys_right() -> None:
    rights = Rights()
    peer = RightsOfPeer(rights.descriptor)
    for number in (0, SLOTS, -SLOTS):
        assert not rights.stands(number) and not peer.stands(number)
    with pytest.raises(ValueError, match="not a transfer"):
        rights.grant(0, "b", [(0, 1)])
    rights.grant(1, "b", [(0, 1)])
    rights.grant(1 + SLOTS, "b", [(0, 1)])  # the word is taken
    assert rights.stands(1) and peer.stands(1)
    assert not rights.stands(1 + SLOTS) and not peer.stands(1 + SLOTS)
    rights.revoke(1 + SLOTS)
    assert peer.stands(1)
    rights.revoke(1)
    assert not peer.stands(1)
    peer.close()
    rights.close()


def _never() -> threading.Event:
    return threading.Event()
