"""The pool's calls, alone and between instances, over either transport."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest

from kvell.errors import ChangeSomething, TryLater
from kvell.memory import audit
from kvell.mempool.entries import Heard, PeerEntry
from kvell.mempool.pool import MemPool
from kvell.mempool.rendezvous import PageTransport
from kvell.mempool.transfers.actions import Action
from kvell.wire.endpoints import Endpoint
from tests.mempool.pools import FULL, SECRET, fill, holds_right, layout_of, pool_at, write
from tests.mempool.waiting import PATIENCE_SECONDS, state_of, used_pages
from tests.patience import until

TEXT = list(range(100, 150))


@pytest.fixture(params=get_args(PageTransport))
def transport(request: pytest.FixtureRequest) -> PageTransport:
    found: PageTransport = request.param
    return found


@pytest.fixture
def pair(tmp_path: Path, transport: PageTransport) -> Iterator[tuple[MemPool, MemPool]]:
    with (
        pool_at(tmp_path, "a", transport=transport) as a,
        pool_at(tmp_path, "b", transport=transport) as b,
    ):
        assert a.connect(address_of(b)) == "b"
        until(lambda: b.peers() == ["a"])
        yield a, b
        for pool in (a, b):
            assert audit(pool.layout, pool.core.snapshot()) == []


def address_of(pool: MemPool) -> Endpoint:
    assert pool.address is not None
    return pool.address


@pytest.mark.parametrize("mix", ["full", "window", "state", "all"])
def test_what_is_inserted_is_matched(mix: str, tmp_path: Path) -> None:
    with pool_at(tmp_path, "a", mix) as pool:
        fill(pool, TEXT)
        lease = pool.match(TEXT)
        assert lease.hit_tokens == len(TEXT)
        assert holds_right(pool, lease, TEXT)
        assert pool.match([*TEXT, 7, 8]).hit_tokens == len(TEXT)
        assert pool.match(TEXT, root="salt").hit_tokens == 0
        assert pool.match([1, *TEXT]).addresses == ()
        assert pool.free_mem(lease) and not pool.free_mem(lease)


def test_leases_end_by_themselves_while_nothing_else_happens(tmp_path: Path) -> None:
    with pool_at(tmp_path, "a") as pool:
        lease = pool.alloc_mem(tokens=40, seconds=0.05)
        assert used_pages(pool)
        until(lambda: not used_pages(pool))
        with pytest.raises(TryLater, match="lease has expired"):
            pool.insert(TEXT[:40], lease)
        assert not pool.free_mem(lease)


def test_too_little_memory_is_said_and_cached_texts_make_way(tmp_path: Path) -> None:
    with pool_at(tmp_path, "a", "full", 8) as pool:
        fill(pool, TEXT)
        first = pool.alloc_mem(pages={pool.layout.groups[0].name: 8})
        assert pool.match(TEXT).hit_tokens == 0
        with pytest.raises(TryLater, match="too few pages"):
            pool.alloc_mem(tokens=16)
        pool.free_mem(first)
        assert pool.alloc_mem(tokens=16).addresses


def test_a_text_is_forgotten_unless_it_is_held_or_shared(tmp_path: Path) -> None:
    with pool_at(tmp_path, "a", "full") as pool:
        fill(pool, TEXT)
        fill(pool, [*TEXT[:32], *range(16)])
        lease = pool.match(TEXT)
        assert pool.delete(TEXT) == 0
        pool.free_mem(lease)
        assert pool.delete(TEXT) == 2
        assert pool.match(TEXT).hit_tokens == 32
        assert pool.match([*TEXT[:32], *range(16)]).hit_tokens == 48


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "tokens"),
        ({"tokens": 3, "pages": {}}, "tokens"),
        ({"pages": {"nothing": 3}}, "nothing"),
    ],
)
def test_what_cannot_be_asked_for_is_named(
    given: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pool_at(tmp_path, "a") as pool, pytest.raises(ChangeSomething, match=named):
        pool.alloc_mem(**given)  # type: ignore[arg-type]


def test_pages_of_another_number_of_tokens_are_refused_and_stay_held(tmp_path: Path) -> None:
    with pool_at(tmp_path, "a") as pool:
        lease = pool.alloc_mem(tokens=40)
        with pytest.raises(ChangeSomething, match=r"alloc_mem\(tokens=50\)"):
            pool.insert(TEXT, lease)
        assert pool.free_mem(lease)


def test_a_text_is_sent_with_all_that_a_request_needs(pair: tuple[MemPool, MemPool]) -> None:
    a, b = pair
    fill(a, TEXT)
    assert a.transfer_with_insert("b", TEXT) == len(TEXT)
    lease = b.match(TEXT)
    assert lease.hit_tokens == len(TEXT)
    assert holds_right(b, lease, TEXT)
    assert a.match(TEXT).hit_tokens == len(TEXT)
    b.free_mem(lease)


def test_a_longer_text_crosses_only_with_its_end(pair: tuple[MemPool, MemPool]) -> None:
    a, b = pair
    fill(a, TEXT)
    a.transfer_with_insert("b", TEXT)
    whole = b.node.mover.copied_bytes
    longer = [*TEXT, *range(8)]
    fill(a, longer)
    a.transfer_with_insert("b", longer)
    assert b.node.mover.copied_bytes - whole < whole
    lease = b.match(longer)
    assert lease.hit_tokens == len(longer)
    assert holds_right(b, lease, longer)


def test_without_insertion_the_text_goes_to_whoever_waits(pair: tuple[MemPool, MemPool]) -> None:
    a, b = pair
    fill(a, TEXT)
    a.transfer("b", TEXT, private=b"request 7")
    lease, private = b.next_arrival(PATIENCE_SECONDS)
    assert private == b"request 7" and lease.hit_tokens == len(TEXT)
    assert holds_right(b, lease, TEXT)
    assert b.match(TEXT).hit_tokens == 0
    assert b.free_mem(lease)
    until(lambda: not used_pages(b))
    with pytest.raises(TryLater, match="no text arrived"):
        b.next_arrival(0.01)


def test_both_sides_may_send_at_once(pair: tuple[MemPool, MemPool]) -> None:
    a, b = pair
    for number in range(20):
        mine, yours = [number, *TEXT], [1000 + number, *TEXT]
        fill(a, mine)
        fill(b, yours)
        assert a.transfer_with_insert("b", mine) == b.transfer_with_insert("a", yours)
        for pool, text in ((b, mine), (a, yours)):
            lease = pool.match(text)
            assert lease.hit_tokens == len(text) and holds_right(pool, lease, text)
            pool.free_mem(lease)


def test_several_connections_are_one_instance(tmp_path: Path, transport: PageTransport) -> None:
    with (
        pool_at(tmp_path, "a", transport=transport) as a,
        pool_at(tmp_path, "b", transport=transport) as b,
    ):
        for _ in range(3):
            a.connect(address_of(b))
            b.connect(address_of(a))
        fill(a, TEXT)
        until(lambda: a.peers() == ["b"] and b.peers() == ["a"])
        assert a.transfer_with_insert("b", TEXT) == len(TEXT)


def test_problems_are_told_to_the_sender(tmp_path: Path, transport: PageTransport) -> None:
    with ExitStack() as stack:
        a = stack.enter_context(pool_at(tmp_path, "a", transport=transport))
        small = stack.enter_context(pool_at(tmp_path, "small", transport=transport))
        group = small.layout.groups[0]
        taken = small.alloc_mem(pages={group.name: 64 * group.pages_per_large})
        other = stack.enter_context(pool_at(tmp_path, "other", "full", transport=transport))
        fill(a, TEXT)
        with pytest.raises(ChangeSomething, match="not cached"):
            a.transfer("small", [9, 9])
        with pytest.raises(TryLater, match="died"):
            a.transfer("nobody", TEXT)
        for pool, why in ((small, "no room"), (other, "layouts")):
            a.connect(address_of(pool))
            with pytest.raises(TryLater, match=why):
                a.transfer(pool.instance, TEXT)
        small.free_mem(taken)
        assert not used_pages(small) and not used_pages(other)
        assert a.match(TEXT).hit_tokens == len(TEXT)


def test_strangers_are_not_let_in(tmp_path: Path) -> None:
    with (
        pool_at(tmp_path, "a") as a,
        MemPool(layout_of("all"), instance="b", secret=b"another") as stranger,
    ):
        with pytest.raises(ChangeSomething, match=r"secret|closed the connection"):
            stranger.connect(tmp_path / "a")
        assert a.peers() == []
        with pytest.raises(TryLater, match="no instance answers"):
            a.connect(tmp_path / "nobody")


def test_a_fault_that_one_peer_finds_is_for_it_alone(
    pair: tuple[MemPool, MemPool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    fill(a, TEXT)
    handle = b.agent.handle

    def fails_once(entry: PeerEntry) -> list[Action]:
        if isinstance(entry, Heard):
            monkeypatch.setattr(b.agent, "handle", handle)
            raise ZeroDivisionError("a mistake of this program")
        return handle(entry)

    monkeypatch.setattr(b.agent, "handle", fails_once)
    with pytest.raises(TryLater):
        a.transfer_with_insert("b", TEXT)
    assert [record.getMessage() for record in caplog.records] == [
        "internal error on the connection with a"
    ]
    a.connect(address_of(b))
    assert a.transfer_with_insert("b", TEXT) == len(TEXT)


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with pool_at(tmp_path, "a"), pytest.raises(ChangeSomething, match="address"):
        pool_at(tmp_path, "a")


Other = tuple["subprocess.Popen[str]", Endpoint]
"""A sender and its address."""


@pytest.fixture
def other(tmp_path: Path, transport: PageTransport) -> Iterator[Other]:
    command = [sys.executable, "-m", "tests.mempool.sender", str(tmp_path), transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        address = process.stdout.readline().strip()
        yield process, address if transport == "tcp" else Path(address)
        process.kill()


def test_a_text_comes_from_another_process(
    other: Other, tmp_path: Path, transport: PageTransport
) -> None:
    with pool_at(tmp_path, "b", transport=transport) as b:
        b.connect(other[1])
        until(lambda: b.match([0, *TEXT]).hit_tokens == len(TEXT) + 1)
        lease = b.match([0, *TEXT])
        assert holds_right(b, lease, [0, *TEXT])


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops_takes_nothing_with_it(
    other: Other, fault: signal.Signals, tmp_path: Path, transport: PageTransport
) -> None:
    """Texts keep coming until the fault; afterwards nothing is held, and all that came is right."""
    sender, address = other
    with pool_at(tmp_path, "b", large_pages=400, transport=transport) as b:
        b.connect(address)
        until(lambda: b.match([3, *TEXT]).hit_tokens)
        os.kill(sender.pid, fault)
        if fault is signal.SIGKILL:
            until(lambda: not b.peers())
            assert sender.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        else:
            until(lambda: state_of(sender.pid) == "T")
        came = 0
        for number in range(400):
            lease = b.match([number, *TEXT])
            if lease.hit_tokens:
                assert holds_right(b, lease, [number, *TEXT])
                came += 1
            b.free_mem(lease)
        assert came >= 4
        b.node.ask(b.node.hang_up)
        until(lambda: not b.node.ask(lambda: len(b.agent.receiving)))
        assert not used_pages(b) or b.match([3, *TEXT]).hit_tokens
        assert audit(b.layout, b.core.snapshot()) == []


def test_the_example_of_the_documentation_holds(tmp_path: Path) -> None:
    layout = layout_of("full")
    with MemPool(layout, instance="a", secret=SECRET) as pool:
        lease = pool.alloc_mem(tokens=20)
        assert len(lease.addresses) == 2
        assert len(pool.view(lease.addresses[0])) == layout.groups[0].page_stride_bytes
        assert FULL.kind.value == "full"
        write(pool, lease, TEXT[:20])
        pool.insert(TEXT[:20], lease)
        assert pool.match(TEXT[:20]).hit_tokens == 20


@pytest.mark.parametrize("known", [0, 20])
def test_a_text_is_fetched_beyond_what_is_here(pair: tuple[MemPool, MemPool], known: int) -> None:
    a, b = pair
    fill(a, TEXT)
    if known:
        fill(b, TEXT[:known])
    assert b.fetch("a", [*TEXT, 1, 2]) == len(TEXT)
    lease = b.match(TEXT)
    assert lease.hit_tokens == len(TEXT)
    assert holds_right(b, lease, TEXT)
    until(lambda: used_pages(a) == 0)


def test_what_nobody_has_more_of_is_not_fetched(pair: tuple[MemPool, MemPool]) -> None:
    a, b = pair
    assert b.fetch("a", TEXT) == 0
    fill(a, TEXT[:20])
    fill(b, TEXT[:20])
    assert b.fetch("a", TEXT) == 20
    with pytest.raises(TryLater, match="nobody died"):
        b.fetch("nobody", TEXT)
