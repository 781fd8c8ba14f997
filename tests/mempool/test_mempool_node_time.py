"""What a node says of time: deadlines of what it hears count from when it hears it."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from kvell.clock import VirtualClock
from kvell.mempool.entries import Heard, PeerEntry, Ticked
from kvell.mempool.node import PageTransferThread
from kvell.mempool.transfers.actions import Action, Send
from kvell.mempool.transfers.messages import Abandon, Transfer
from tests.pages.pools import group, pool_of

LAYOUT = pool_of(2, group(4, 2))
PATIENCE_SECONDS = 30.0
IDLE_SECONDS = 50.0


class Told:
    def __init__(self, name: str, folder: Path, clock: VirtualClock) -> None:
        self.entries: list[PeerEntry] = []
        self.heard = Event()
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, LAYOUT.pool_bytes)
        memory = np.frombuffer(mmap.mmap(self._descriptor, LAYOUT.pool_bytes), np.uint8)
        self.node = PageTransferThread(
            *(name, 1, "print", self._take, LAYOUT.groups, memory, self._descriptor),
            address=folder / name,
            secret=b"s",
            clock=clock,
        )
        self.node.start()

    def _take(self, entry: PeerEntry) -> list[Action]:
        self.entries.append(entry)
        if isinstance(entry, Heard):
            self.heard.set()
        return []

    def close(self) -> None:
        self.node.close()
        os.close(self._descriptor)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def nodes(tmp_path: Path, clock: VirtualClock) -> Iterator[tuple[Told, Told]]:
    one, other = Told("a", tmp_path, clock), Told("b", tmp_path, clock)
    one.node.connect(tmp_path / "b")
    yield one, other
    one.close()
    other.close()


def test_an_idle_node_says_what_time_it_is_before_what_it_hears(
    nodes: tuple[Told, Told], clock: VirtualClock
) -> None:
    """Else the deadline of what is heard would be over when the next tick comes."""
    one, other = nodes
    clock.advance(IDLE_SECONDS)
    one.node.post([Send("b", Abandon(Transfer("a", 1, 1), "why"))])
    assert other.heard.wait(PATIENCE_SECONDS)
    kinds = [type(entry) for entry in other.entries]
    before = other.entries[: kinds.index(Heard)]
    assert Ticked(int(IDLE_SECONDS * 1000)) in before


def test_a_deadline_that_nobody_takes_in_is_told_once(
    nodes: tuple[Told, Told], clock: VirtualClock
) -> None:
    """Whoever has the agent may be in a step: the thread waits with it, and tells no more."""
    one, other = nodes
    clock.advance(IDLE_SECONDS)
    now = int(IDLE_SECONDS * 1000)
    one.node.wake_at(now - 1)
    for number in range(20):  # turns of the node's thread
        one.node.post([Send("b", Abandon(Transfer("a", 1, number), "why"))])
        assert other.heard.wait(PATIENCE_SECONDS)
        one.node.peers()
    assert one.entries.count(Ticked(now)) == 1
    one.node.wake_at(now)
    one.node.peers()
    one.node.peers()
    assert one.entries.count(Ticked(now)) == 2
