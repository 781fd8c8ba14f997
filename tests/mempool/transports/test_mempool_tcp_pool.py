"""Texts that cross over TCP while connections are damaged, cut and slow."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvell.errors import TryLater
from kvell.memory import audit
from kvell.mempool.pool import MemPool
from kvell.wire.endpoints import connect_to
from tests.mempool.pools import fill, holds_right, pool_at
from tests.mempool.seen import (
    channels_of,
    num_receiving,
    peer_of,
)
from tests.mempool.transports.relay import Passes, Relay, unchanged
from tests.patience import until

PATIENCE_SECONDS = 30.0
TEXT = list(range(100, 150))
MESSAGES, PAGES = 0, 1
"""Connections of a pair, in the order in which they are made."""
HEAD = b"PieceHead"
"""Is said before each piece."""


@contextmanager
def pair(folder: Path, passes: Passes) -> Iterator[tuple[MemPool, MemPool, Relay]]:
    """A sender, a receiver, and what is between them."""
    with (
        pool_at(folder, "a", transport="tcp") as a,
        pool_at(folder, "b", transport="tcp") as b,
        Relay(int(str(a.address).rpartition(":")[2]), passes) as relay,
    ):
        b.connect(relay.address)
        until(lambda: a.peers() == ["b"])
        yield a, b, relay
        until(lambda: not a.node.ask(lambda: len(a.agent.sending)))
        until(lambda: not num_receiving(b))
        for pool in (a, b):
            assert audit(pool.layout, pool.core.snapshot()) == []


def has_nothing(pool: MemPool) -> bool:
    return not any(pool.core.snapshot().used) and pool.match(TEXT).hit_tokens == 0


def comes_whole(a: MemPool, b: MemPool) -> None:
    assert a.transfer_with_insert("b", TEXT) == len(TEXT)
    lease = b.match(TEXT)
    assert lease.hit_tokens == len(TEXT) and holds_right(b, lease, TEXT)
    b.free_mem(lease)


class InPages:
    """Does something to the first piece of the pages' connection, a little behind its head."""

    def __init__(self, does: Callable[[bytes, int], bytes | None]) -> None:
        self._does, self.times = does, 0

    def __call__(self, connection: int, _offset: int, data: bytes) -> bytes | None:
        at = data.find(HEAD)
        if connection != PAGES or at < 0 or self.times:
            return data
        assert len(data) > at + 200
        self.times += 1
        return self._does(data, at + 150)


def test_a_damaged_piece_fails_the_transfer_by_name(tmp_path: Path) -> None:
    flip = InPages(lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    with pair(tmp_path, flip) as (a, b, relay):
        fill(a, TEXT)
        with pytest.raises(TryLater, match=r"damaged in transit: its checksum differs"):
            a.transfer_with_insert("b", TEXT)
        assert flip.times == 1
        assert has_nothing(b)
        comes_whole(a, b)
        assert len(relay.passed_bytes) == 3  # for messages, and twice for pages


def test_a_cut_in_the_middle_of_the_pages_fails_only_that_transfer(tmp_path: Path) -> None:
    with pair(tmp_path, cut := InPages(lambda _data, _at: None)) as (a, b, _):
        fill(a, TEXT)
        with pytest.raises(TryLater, match="its pages did not arrive"):
            a.transfer_with_insert("b", TEXT)
        assert cut.times == 1
        assert has_nothing(b) and a.peers() == ["b"]
        comes_whole(a, b)


def test_a_sender_that_dies_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    relay: Relay

    def dies(_data: bytes, _at: int) -> None:
        relay.cut()

    with pair(tmp_path, death := InPages(dies)) as (a, b, relay):
        fill(a, TEXT)
        with pytest.raises(TryLater, match="b died"):
            a.transfer_with_insert("b", TEXT)
        assert death.times == 1
        until(lambda: not b.peers())
        until(lambda: has_nothing(b))
        b.connect(relay.address)
        until(lambda: a.peers() == ["b"])
        comes_whole(a, b)


def test_what_is_given_up_in_the_middle_never_counts(tmp_path: Path) -> None:
    """The sender's deadline passes while a piece is on its way; its late bytes change nothing."""
    given_up = threading.Event()

    def waits(data: bytes, _at: int) -> bytes:
        given_up.wait(PATIENCE_SECONDS)
        return data

    with pair(tmp_path, late := InPages(waits)) as (a, b, _):
        fill(a, TEXT)
        with pytest.raises(TryLater, match="timed out"):
            a.transfer_with_insert("b", TEXT, seconds=0.5)
        until(lambda: not num_receiving(b))
        assert late.times == 1
        given_up.set()
        assert has_nothing(b)
        comes_whole(a, b)


def test_a_slow_reader_stops_nobody(tmp_path: Path) -> None:
    """While one receiver does not take its piece, the sender sends to another and is answered."""
    with ThreadPoolExecutor(1) as threads:
        others: list[int] = []

        def meanwhile(data: bytes, _at: int) -> bytes:
            with pool_at(tmp_path, "c", transport="tcp") as c:
                c.connect(str(a.address))
                until(lambda: "c" in a.peers())
                others.append(a.transfer_with_insert("c", TEXT))
                lease = c.match(TEXT)
                assert holds_right(c, lease, TEXT)
            return data

        with pair(tmp_path, InPages(meanwhile)) as (a, b, _):
            fill(a, TEXT)
            sending = threads.submit(a.transfer_with_insert, "b", TEXT)
            assert sending.result(PATIENCE_SECONDS) == len(TEXT)
            assert others == [len(TEXT)]
            lease = b.match(TEXT)
            assert holds_right(b, lease, TEXT)


def test_a_peer_that_breaks_the_protocol_after_its_greeting_is_lost(tmp_path: Path) -> None:
    def garbles(connection: int, offset: int, data: bytes) -> bytes:
        return data if connection != MESSAGES or not garbles_now else b"x" * len(data)

    garbles_now = False
    with pair(tmp_path, garbles) as (a, b, _):
        fill(a, TEXT)
        garbles_now = True
        with pytest.raises(TryLater, match="b died"):
            a.transfer_with_insert("b", TEXT)
        until(lambda: not b.peers())
        assert has_nothing(b)


def test_a_restart_in_its_place_is_another_incarnation(tmp_path: Path) -> None:
    """The name is known with an older incarnation: that one is lost, and texts go to the new."""
    with pool_at(tmp_path, "a", transport="tcp") as a:
        fill(a, TEXT)
        old = pool_at(tmp_path, "b", transport="tcp")
        old.connect(str(a.address))
        until(lambda: a.peers() == ["b"])
        assert a.transfer_with_insert("b", TEXT) == len(TEXT)
        with pool_at(tmp_path, "b", transport="tcp") as new:
            new.connect(str(a.address))
            until(lambda: a.node.ask(lambda: incarnation_of(a)) == new.incarnation)
            comes_whole(a, new)
            until(lambda: not old.peers())
        old.close()


def incarnation_of(pool: MemPool) -> int:
    incarnation: int = peer_of(pool, "b").greeting.incarnation
    return incarnation


def test_connections_are_kept_for_the_next_text_and_end_with_the_peer(tmp_path: Path) -> None:
    with pool_at(tmp_path, "a", transport="tcp") as a:
        with pair_through(tmp_path, a) as (b, relay):
            for number in range(5):
                text = [number, *TEXT]
                fill(a, text)
                assert a.transfer_with_insert("b", text) == len(text)
            assert len(relay.passed_bytes) == 2
            assert len(a.node.connections.page_server) == 1
            assert b.peers() == ["a"]
        until(lambda: a.peers() == [] and len(a.node.connections.page_server) == 0)


@contextmanager
def pair_through(folder: Path, a: MemPool) -> Iterator[tuple[MemPool, Relay]]:
    port = int(str(a.address).rpartition(":")[2])
    with pool_at(folder, "b", transport="tcp") as b, Relay(port, unchanged) as relay:
        b.connect(relay.address)
        until(lambda: a.peers() == ["b"])
        yield b, relay


def test_both_kinds_of_connections_keep_their_hosts_in_sight(tmp_path: Path) -> None:
    """A host that vanishes without a word is noticed by the system."""
    with pool_at(tmp_path, "a", transport="tcp") as a, pool_at(tmp_path, "b", transport="tcp") as b:
        b.connect(str(a.address))
        until(lambda: a.peers() == ["b"])
        fill(a, TEXT)
        a.transfer_with_insert("b", TEXT)
        found = [peer_of(a, "b").socket, peer_of(b, "a").socket]
        found += [channel.socket for channel in channels_of(a.node.connections.page_server)]
        found.append(connect_to(str(a.address), 10))
        assert len(found) == 4
        for one in found:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        found[-1].close()
