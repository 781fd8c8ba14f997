"""Nodes that pull what their peers compute: hints go to who copies, and not to the agent."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from kvell.memory import GroupKind, LayerSpec, plan_layout
from kvell.mempool.entries import Heard, PeerEntry, PullEnded
from kvell.mempool.node import PageTransferThread
from kvell.mempool.transfers.actions import Action, Pull, PullRest, Send
from kvell.mempool.transfers.messages import Abandon, Offer, PeerMessage, Transfer, Written
from kvell.mempool.transports.page_copies import Bytes
from kvell.pages.stages import stages_of
from kvell.wire.endpoints import Endpoint
from tests.mempool.pools import SECRET

LAYOUT = plan_layout([LayerSpec(i, GroupKind.FULL, 1, 8, 2) for i in range(4)], 1 << 18)
(GROUP,) = LAYOUT.groups
STAGES = len(stages_of(LAYOUT.groups))
PATIENCE_SECONDS = 30.0
TRANSFER = Transfer("a", 1, 1)
SAID = Abandon(Transfer("c", 1, 1), "said")


class Told:
    """A node over memory of its own, and what it told its agent."""

    def __init__(self, name: str, address: Endpoint) -> None:
        self.entries: SimpleQueue[PeerEntry] = SimpleQueue()
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, LAYOUT.pool_bytes)
        memory = mmap.mmap(self._descriptor, LAYOUT.pool_bytes)
        self.memory: Bytes = np.frombuffer(memory, np.uint8)
        self.node = PageTransferThread(
            *(name, 1, "print", self._take, LAYOUT.groups, self.memory, self._descriptor),
            address=address,
            secret=SECRET,
        )
        self.node.start()

    def _take(self, entry: PeerEntry) -> list[Action]:
        if isinstance(entry, Heard | PullEnded):
            self.entries.put(entry)
        return []

    def next(self) -> PeerEntry:
        return self.entries.get(timeout=PATIENCE_SECONDS)

    def say(self, to: str, *messages: PeerMessage) -> None:
        self.node.post([Send(to, message) for message in messages])

    def page(self, page: int) -> Bytes:
        start = page * GROUP.page_stride_bytes
        return self.memory[start : start + GROUP.page_bytes]

    def close(self) -> None:
        self.node.close()
        os.close(self._descriptor)


@pytest.fixture(params=["memory", "tcp"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Told, Told, Told]]:
    def address(name: str) -> Endpoint:
        return tmp_path / name if request.param == "memory" else "tcp://127.0.0.1:0"

    a, b, c = (Told(name, address(name)) for name in "abc")
    for one in (a, c):
        assert b.node.address is not None
        one.node.connect(b.node.address)
    wait_until(lambda: b.node.peers() == ["a", "c"], b)  # it sets up those that connect by itself
    a.node.rights.grant(TRANSFER.number, "b", [(0, LAYOUT.pool_bytes)])
    yield a, b, c
    for one in (a, b, c):
        one.close()


def wait_until(condition: Callable[[], bool], one: Told) -> None:
    """Wait for a condition; each look is a turn of the node's thread."""
    for _ in range(1_000_000):
        if condition():
            return
        one.node.peers()
    raise AssertionError("it never happened")


def pull() -> Pull:
    return Pull(TRANSFER, np.asarray([(0, 3, 5), (0, 4, 8)], np.int32), STAGES)


def test_stages_come_one_by_one_and_the_rest_ends_it(nodes: tuple[Told, Told, Told]) -> None:
    """The layer that is written last is written behind the first one's arrival."""
    a, b, _ = nodes
    b.node.post([pull()])
    size = GROUP.layer_page_bytes
    for stage in range(STAGES):
        for page in (3, 4):
            a.page(page)[stage * size : (stage + 1) * size] = 10 * page + stage
        a.say("b", Written(TRANSFER, stage))
        copied_bytes = 2 * size * (stage + 1)
        wait_until(lambda want=copied_bytes: b.node.mover.copied_bytes == want, b)  # type: ignore[misc]
        assert (b.page(5)[stage * size : (stage + 1) * size] == 30 + stage).all()
    a.say("b", Offer(TRANSFER, b""))
    heard = b.next()
    assert heard == Heard("a", Offer(TRANSFER, b"")), "hints are not for the agent"
    b.node.post([PullRest(TRANSFER)])
    assert b.next() == PullEnded(TRANSFER, "")
    assert (b.page(5) == a.page(3)).all() and (b.page(8) == a.page(4)).all()
    assert b.node.mover.copied_bytes == 2 * GROUP.page_bytes


def test_hints_that_come_before_the_pull_are_kept(nodes: tuple[Told, Told, Told]) -> None:
    a, b, _ = nodes
    a.page(3)[:], a.page(4)[:] = 7, 8
    a.say("b", Written(TRANSFER, 1), SAID)
    assert b.next() == Heard("a", SAID)
    b.node.post([pull()])
    half_bytes = 2 * 2 * GROUP.layer_page_bytes
    wait_until(lambda: b.node.mover.copied_bytes == half_bytes, b)
    b.node.post([PullRest(TRANSFER)])
    assert b.next() == PullEnded(TRANSFER, "")
    assert (b.page(5) == 7).all() and (b.page(8) == 8).all()


def test_only_the_sender_of_a_transfer_says_how_far_it_is(nodes: tuple[Told, Told, Told]) -> None:
    _, b, c = nodes
    b.node.post([pull()])
    c.say("b", Written(TRANSFER, STAGES - 1), SAID)
    assert b.next() == Heard("c", SAID)
    assert b.node.mover.copied_bytes == 0
    b.node.post([PullRest(TRANSFER)])
    assert b.next() == PullEnded(TRANSFER, "")


def test_a_right_that_goes_between_two_stages_spoils_the_pull(
    nodes: tuple[Told, Told, Told],
) -> None:
    a, b, _ = nodes
    b.node.post([pull()])
    a.say("b", Written(TRANSFER, 0))
    wait_until(lambda: b.node.mover.copied_bytes > 0, b)
    a.node.rights.revoke(TRANSFER.number)
    a.say("b", Written(TRANSFER, 1))
    assert b.next() == PullEnded(TRANSFER, "the right to read was revoked")
    b.node.post([PullRest(TRANSFER)])
    a.say("b", SAID)
    assert b.next() == Heard("a", SAID)
