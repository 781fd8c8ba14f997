"""Pages over TCP: what comes is right, or it does not count; and nobody waits for the slow."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.transports.page_copies import Bytes, Piece
from kvell.mempool.transports.source import RIGHT_GONE, STOPPED
from kvell.mempool.transports.tcp import served_peers, tcp_pages
from kvell.mempool.transports.tcp import tcp_pages as reading
from kvell.mempool.transports.tcp.tcp_pages import (
    MOST_EXTENTS,
    PIECE_BYTES,
    PIECE_PARTS,
    ReadPages,
    TcpPages,
    in_pieces,
    pack,
    unpack,
)
from kvell.wire.frames import frame
from tests.depth import few
from tests.mempool.transports.creditors import PATIENCE_SECONDS
from tests.mempool.transports.owners import GRANTED, Owner, channel_to, pages_at
from tests.mempool.transports.relay import Flip, Hold, Relay
from tests.patience import until

SMALL_BYTES = 4096
LARGE_BYTES = 64 << 20
"""More than sockets on the way can hold."""
SOME = [Piece(0, 100, 700), Piece(1000, 1000, 900), Piece(2048, 3000, 1)]
WHOLE = [Piece(0, 0, LARGE_BYTES)]


def bring(
    pages: TcpPages,
    pieces: list[Piece],
    target: Bytes,
    stop: threading.Event | None = None,
    number: int = GRANTED,
) -> str:
    return pages.bring(number, pieces, target, stop or threading.Event())


def expected(owner: Owner, pieces: list[Piece]) -> Bytes:
    """What a pool of zeros holds after the pieces have come."""
    found = np.zeros(len(owner.memory), np.uint8)
    for one in pieces:
        end = one.source + one.size_bytes
        found[one.target : one.target + one.size_bytes] = owner.memory[one.source : end]
    return found


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner(SMALL_BYTES) as one:
        yield one


@pytest.fixture
def pages(owner: Owner) -> Iterator[TcpPages]:
    one = pages_at(owner.port)
    yield one
    one.close()


@pytest.mark.parametrize("piece_bytes", [7, 512, PIECE_BYTES])
@pytest.mark.parametrize("most_extents", [1, 2, MOST_EXTENTS])
def test_what_comes_is_what_is_there(
    owner: Owner,
    pages: TcpPages,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    most_extents: int,
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(reading, "MOST_EXTENTS", most_extents)
    monkeypatch.setattr(tcp_pages, "MOST_EXTENTS", most_extents)
    target = np.zeros(SMALL_BYTES, np.uint8)
    for _ in range(3):
        assert bring(pages, SOME, target) == ""
        assert (target == expected(owner, SOME)).all()
    assert len(owner.server) == 1  # all over one connection


def test_many_parts_and_many_pieces_come_in_their_order() -> None:
    """Every other 4 KiB of 24 MiB, the last first."""
    with Owner(24 << 20) as owner:
        pages = pages_at(owner.port)
        starts = range(0, len(owner.memory), 8192)
        pieces = [
            Piece(start, there, 4096) for start, there in zip(starts, reversed(starts), strict=True)
        ]
        assert len(pieces) > 10 * PIECE_PARTS
        target = np.zeros(len(owner.memory), np.uint8)
        assert bring(pages, pieces, target) == ""
        assert (target == expected(owner, pieces)).all()
        pages.close()


@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 3 * PIECE_BYTES)), max_size=30),
    st.integers(0, 1 << 30),
)
def test_both_sides_cut_extents_alike(extents: list[tuple[int, int]], moved: int) -> None:
    """Where they are cut depends on sizes alone; nothing is left out, doubled or too large."""
    pieces = list(in_pieces(extents))
    others = list(in_pieces((offset + moved, size) for offset, size in extents))
    assert others == [[(offset + moved, size) for offset, size in piece] for piece in pieces]
    joined: list[tuple[int, int]] = []
    for piece in pieces:
        assert 0 < len(piece) <= PIECE_PARTS
        assert 0 < sum(size for _, size in piece) <= PIECE_BYTES
        joined += piece
    for offset, size in extents:
        done = 0
        while done < size:
            part = joined.pop(0)
            assert part[0] == offset + done
            done += part[1]
        assert done == size
    assert joined == []


@given(st.lists(st.tuples(st.integers(-5, 150), st.integers(-5, 150)), max_size=5))
def test_only_extents_inside_the_pool_are_read(extents: list[tuple[int, int]]) -> None:
    inside = all(start >= 0 and size > 0 and start + size <= 100 for start, size in extents)
    if extents and inside and sum(size for _, size in extents) <= 100:
        assert unpack(pack(extents), 100) == extents
    else:
        with pytest.raises(ValueError, match=r"offered|no such"):
            unpack(pack(extents), 100)


@pytest.mark.parametrize(
    "extents", [[(1 << 62, 1 << 62)], [(-1, 1)], [(0, (1 << 63) - 1)], [(0, 1)] * 9000]
)
def test_extents_that_overflow_are_refused(extents: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"offered|no such"):
        unpack(pack(extents), SMALL_BYTES)


def test_a_refusal_is_told_and_the_connection_serves_on(owner: Owner, pages: TcpPages) -> None:
    target = np.zeros(SMALL_BYTES, np.uint8)
    assert bring(pages, SOME, target, number=GRANTED + 1) == RIGHT_GONE
    assert "beyond the sender's memory" in bring(pages, [Piece(SMALL_BYTES - 1, 0, 2)], target)
    owner.rights.revoke(GRANTED)
    assert bring(pages, SOME, target) == RIGHT_GONE
    assert not target.any()
    owner.grant(GRANTED + 2)
    assert bring(pages, SOME, target, number=GRANTED + 2) == ""
    assert len(owner.server) == 1


def test_a_right_that_goes_while_pages_are_read_ends_it() -> None:
    with Owner(LARGE_BYTES) as owner, Relay(owner.port, hold := Hold(3 << 20)) as relay:
        pages, target = pages_at(relay.port), np.zeros(LARGE_BYTES, np.uint8)
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(bring, pages, WHOLE, target)
            assert hold.holds.wait(PATIENCE_SECONDS)
            owner.rights.revoke(GRANTED)
            owner.memory[:] = 0  # the pages are somebody else's
            hold.released.set()
            assert pulling.result(PATIENCE_SECONDS) == RIGHT_GONE
        assert 3 << 20 < relay.passed_bytes[0] < LARGE_BYTES  # it was in the middle
        pages.close()


def test_a_flipped_bit_anywhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every single offset of what the owner says."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 64)
    pieces = [Piece(0, 0, 100), Piece(200, 300, 30)]
    with Owner(512) as owner:
        with Relay(owner.port) as relay:
            pages, target = pages_at(relay.port), np.zeros(512, np.uint8)
            assert bring(pages, pieces, target) == ""
            said_bytes = relay.passed_bytes[0]
            pages.close()
        assert said_bytes > 130
        with Relay(owner.port) as relay:
            for offset in range(said_bytes):
                relay.passes = flip = Flip(offset)
                pages, target = pages_at(relay.port), np.zeros(512, np.uint8)
                problem = bring(pages, pieces, target)
                assert flip.flipped == 1
                assert problem.startswith("its pages did not arrive"), offset
                assert bring(pages, pieces, target) == ""  # over a new connection
                assert (target == expected(owner, pieces)).all()
                pages.close()


def test_damage_in_the_middle_of_a_piece_has_its_name() -> None:
    with Owner(LARGE_BYTES) as owner, Relay(owner.port, flip := Flip(LARGE_BYTES // 2)) as relay:
        pages, target = pages_at(relay.port), np.zeros(LARGE_BYTES, np.uint8)
        assert "checksum differs" in bring(pages, WHOLE, target)
        assert flip.flipped == 1
        assert np.count_nonzero(target != owner.memory) >= 1
        pages.close()


def test_an_owner_that_dies_in_the_middle_is_noticed() -> None:
    def cut(_connection: int, offset: int, data: bytes) -> bytes | None:
        return None if offset > LARGE_BYTES // 2 else data

    with Owner(LARGE_BYTES) as owner, Relay(owner.port, cut) as relay:
        pages, target = pages_at(relay.port), np.zeros(LARGE_BYTES, np.uint8)
        assert "closed the connection" in bring(pages, WHOLE, target)
        assert LARGE_BYTES // 2 < relay.passed_bytes[0] < LARGE_BYTES
        pages.close()
        until(lambda: len(owner.server) == 0)


def test_nobody_at_the_other_end_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pages = pages_at(port)
    assert "did not arrive" in bring(pages, SOME, np.zeros(SMALL_BYTES, np.uint8))
    pages.close()


def test_after_a_stop_nothing_is_written_and_late_bytes_are_dropped() -> None:
    with Owner(LARGE_BYTES) as owner, Relay(owner.port, hold := Hold(3 << 20)) as relay:
        pages, target = pages_at(relay.port), np.zeros(LARGE_BYTES, np.uint8)
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(bring, pages, WHOLE, target, stop)
            assert hold.holds.wait(PATIENCE_SECONDS)
            stop.set()
            assert pulling.result(PATIENCE_SECONDS) == STOPPED
        target[:] = 0  # somebody else's now
        relay.passes = lambda _connection, _offset, data: data
        hold.released.set()
        few = [Piece(5, 10, 20)]
        assert bring(pages, few, target) == ""
        assert (target == expected(owner, few)).all()
        assert len(relay.passed_bytes) == 2
        pages.close()
        until(lambda: len(owner.server) == 0)
        assert (target == expected(owner, few)).all()


def test_closing_ends_a_pull_that_is_under_way() -> None:
    with Owner(LARGE_BYTES) as owner, Relay(owner.port, hold := Hold(3 << 20)) as relay:
        pages, target = pages_at(relay.port), np.zeros(LARGE_BYTES, np.uint8)
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(bring, pages, WHOLE, target)
            assert hold.holds.wait(PATIENCE_SECONDS)
            pages.close()
            assert "did not arrive" in pulling.result(PATIENCE_SECONDS)
        hold.released.set()
        assert "no longer connected" in bring(pages, SOME, target)
        until(lambda: len(owner.server) == 0)


def test_an_owner_that_closes_waits_for_nobody() -> None:
    with Owner(LARGE_BYTES) as owner, Relay(owner.port, hold := Hold(3 << 20)) as relay:
        pages, target = pages_at(relay.port), np.zeros(LARGE_BYTES, np.uint8)
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(bring, pages, WHOLE, target)
            assert hold.holds.wait(PATIENCE_SECONDS)
            assert len(owner.server) == 1
            owner.server.close()
            assert len(owner.server) == 0  # nothing is read any more
            hold.released.set()
            assert "did not arrive" in pulling.result(PATIENCE_SECONDS)
        assert relay.passed_bytes[0] < LARGE_BYTES
        pages.close()


def request(extents: list[tuple[int, int]], number: int = GRANTED) -> bytes:
    return frame(msgspec.msgpack.encode(ReadPages(number, pack(extents))))


def test_a_peer_that_reads_nothing_is_given_up_while_others_are_served() -> None:
    with Owner(LARGE_BYTES, piece_seconds=2.0) as owner:
        owner.names = ["puller", "quick"]
        owner.grant(GRANTED + 1, "quick")
        with socket.create_connection(("127.0.0.1", owner.port)) as slow:
            slow.sendall(request([(0, LARGE_BYTES)]))
            until(lambda: len(owner.server) == 1)
            pages, target = pages_at(owner.port), np.zeros(LARGE_BYTES, np.uint8)
            few = [Piece(0, 0, SMALL_BYTES)]
            assert bring(pages, few, target, number=GRANTED + 1) == ""
            assert (target == expected(owner, few)).all()
            until(lambda: len(owner.server) == 1)  # the quick one's
            assert bring(pages, few, target, number=GRANTED + 1) == ""
            slow.settimeout(PATIENCE_SECONDS)
            received = 0
            with pytest.raises((ConnectionError, EOFError)):
                while data := slow.recv(1 << 20):
                    received += len(data)
                raise EOFError
            assert 0 < received < LARGE_BYTES
            pages.close()


@pytest.mark.parametrize(
    "said",
    [
        request([(0, 1)])[:5],
        request([(0, 1)])[:-1],
        request([(0, 1)] * (MOST_EXTENTS + 99)),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        frame(b"\xc1"),
        frame(msgspec.msgpack.encode({"type": "ReadPages"})),
        frame(b"x" * 20)[:-1] + b"y",
    ],
    ids=["half a header", "half a request", "too long", "http", "rubbish", "fields", "damaged"],
)
def test_what_is_no_request_ends_the_connection(said: bytes) -> None:
    with Owner(SMALL_BYTES, piece_seconds=0.3) as owner:
        with socket.create_connection(("127.0.0.1", owner.port)) as sock:
            sock.settimeout(PATIENCE_SECONDS)
            sock.sendall(said)
            with contextlib.suppress(ConnectionResetError):  # it had not read all of it
                assert sock.recv(100) == b""
            until(lambda: len(owner.server) == 0)
        pages, target = pages_at(owner.port), np.zeros(SMALL_BYTES, np.uint8)
        until(lambda: bring(pages, SOME, target) == "")
        pages.close()


def test_readers_are_bounded_and_each_instance_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_peers, "MOST_PEERS", 2)
    with Owner(SMALL_BYTES) as owner:
        owner.names = ["puller", "b", "c"]
        owner.grant(GRANTED + 1, "b")
        target = np.zeros(SMALL_BYTES, np.uint8)
        a, b, c = (pages_at(owner.port) for _ in range(3))
        assert bring(a, SOME, target) == bring(b, SOME, target, number=GRANTED + 1) == ""
        assert "did not arrive" in bring(c, SOME, target)
        b.close()
        until(lambda: len(owner.server) == 1)
        owner.names = ["puller"]
        again = pages_at(owner.port)
        assert bring(again, SOME, target) == ""
        until(lambda: len(owner.server) == 1)  # what it had before ended
        assert bring(again, SOME, target) == ""
        for one in (a, again, c):
            one.close()


@few()
@given(said=st.binary(max_size=200))
def test_rubbish_ends_only_its_own_connection(said: bytes) -> None:
    with Owner(SMALL_BYTES) as owner:
        owner.names = ["rude", "puller"]
        channel = channel_to(owner.port)
        channel.socket.settimeout(PATIENCE_SECONDS)
        channel.socket.sendall(said)
        with contextlib.suppress(OSError):  # it may have ended already
            channel.socket.shutdown(socket.SHUT_WR)
            assert channel.socket.recv(100) == b""
        channel.close()
        pages, target = pages_at(owner.port), np.zeros(SMALL_BYTES, np.uint8)
        assert bring(pages, SOME, target) == ""
        pages.close()
