"""A process that is stopped in the middle of a transfer, is given up, and wakes late."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvell.errors import TryLater
from kvell.memory import audit
from kvell.mempool.buffer import Lease
from kvell.mempool.entries import Ticked
from kvell.mempool.pool import MemPool
from tests.mempool.pools import fill, holds_right, pool_at
from tests.mempool.sleeper import (
    FIRST,
    LARGE_PAGES,
    MOMENTS_OF_RECEIVER,
    NAME,
    NEXT,
    OFFER,
    OVERWRITTEN,
)
from tests.mempool.waiting import PATIENCE_SECONDS, state_of, used_pages
from tests.patience import until

TEXT, OTHER = list(range(100, 150)), list(range(200, 260))
WAYS = ("its time is up", "it is taken for dead")
FAR = 1_000_000


@dataclass
class Sleeper:
    process: "subprocess.Popen[str]"

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def sleeps(self) -> bool:
        return state_of(self.process.pid) == "T"

    def wake(self) -> None:
        assert self.sleeps()
        os.kill(self.process.pid, signal.SIGCONT)

    def rested(self, text: list[int]) -> dict[str, Any]:
        """Its state once nothing is on its way to it; nothing may be held then."""
        until(lambda: not self.ask("state", text)["coming"])
        state: dict[str, Any] = self.ask("state", text)
        assert (state["used"], state["problems"]) == (0, [])
        return state


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Sleeper]:
    command = [sys.executable, "-m", "tests.mempool.sleeper", str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        sleeper = Sleeper(process)
        assert sleeper.answer() == "ready"
        yield sleeper
        process.kill()


def give_up(pool: MemPool, way: str) -> None:
    """End all that is under way with the sleeper, as an engine or its front would."""
    node = pool.node
    if way == WAYS[0]:
        late = Ticked(node.now() + FAR)
        node.ask(lambda: node.act(pool.agent.handle(late)))
    else:
        node.ask(node.hang_up)


def overwrite(pool: MemPool, text: list[int]) -> None:
    """Forget a text, and give every byte of its pages to others, who write into it."""
    lease = pool.match(text)
    assert lease.hit_tokens == len(text)
    places = [(one.offset, len(pool.view(one))) for one in lease.addresses]
    pool.free_mem(lease)
    pool.delete(text)
    taken: list[Lease] = []
    for group in pool.layout.groups:
        try:
            while True:
                taken.append(pool.alloc_mem(pages={group.name: 1}))
                for address in taken[-1].addresses:
                    pool.view(address)[:] = OVERWRITTEN
        except TryLater:
            continue
    assert all((pool.memory[at : at + size] == OVERWRITTEN).all() for at, size in places)
    for lease in taken:
        pool.free_mem(lease)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS_OF_RECEIVER)
def test_a_receiver_that_wakes_late_discards_what_it_read(
    sleeper: Sleeper, moment: str, way: str, tmp_path: Path
) -> None:
    """It reads what others have written since, finds its right gone, and keeps nothing."""
    with pool_at(tmp_path, "a", large_pages=LARGE_PAGES) as a, ThreadPoolExecutor(1) as threads:
        a.connect(tmp_path / NAME)
        fill(a, TEXT)
        sleeper.ask("sleep", moment)
        sent: Future[int] = threads.submit(a.transfer_with_insert, NAME, TEXT)
        until(sleeper.sleeps)
        give_up(a, way)
        with pytest.raises(TryLater, match="the transfer ended"):
            sent.result(PATIENCE_SECONDS)
        overwrite(a, TEXT)
        sleeper.wake()
        state = sleeper.rested(TEXT)
        assert state["hit"] == 0
        assert bool(state["stale"]) == (moment in (FIRST, NEXT)), "it has read others' pages"
        assert used_pages(a) == 0 and audit(a.layout, a.core.snapshot()) == []

        if way == WAYS[1]:
            a.connect(tmp_path / NAME)
        fill(a, OTHER)
        assert a.transfer_with_insert(NAME, OTHER) == len(OTHER)
        state = sleeper.rested(OTHER)
        assert (state["hit"], state["right"]) == (len(OTHER), True)


@pytest.mark.parametrize("moment", MOMENTS_OF_RECEIVER)
def test_a_receiver_that_wakes_in_time_has_all_of_it(
    sleeper: Sleeper, moment: str, tmp_path: Path
) -> None:
    """While it sleeps, what it may read stays as it is, however much room others want."""
    with pool_at(tmp_path, "a", large_pages=LARGE_PAGES) as a, ThreadPoolExecutor(1) as threads:
        a.connect(tmp_path / NAME)
        fill(a, TEXT)
        sleeper.ask("sleep", moment)
        sent: Future[int] = threads.submit(a.transfer_with_insert, NAME, TEXT)
        until(sleeper.sleeps)
        for group in a.layout.groups:
            with pytest.raises(TryLater, match="too few pages"):
                a.alloc_mem(pages={group.name: LARGE_PAGES * group.pages_per_large})
        assert not a.delete(TEXT)
        sleeper.wake()
        assert sent.result(PATIENCE_SECONDS) == len(TEXT)
        state = sleeper.rested(TEXT)
        assert (state["hit"], state["right"], state["stale"]) == (len(TEXT), True, 0)
        assert used_pages(a) == 0


def test_a_receiver_whose_sender_died_has_all_or_nothing(sleeper: Sleeper, tmp_path: Path) -> None:
    """What a dead process has offered nobody changes any more, so either is right."""
    command = [sys.executable, "-m", "tests.mempool.sender", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"
        sleeper.ask("sleep", NEXT)
        sleeper.ask("connect", "sender")
        until(sleeper.sleeps)
        sender.kill()
        sender.wait(PATIENCE_SECONDS)
    sleeper.wake()
    for number in range(5):
        state = sleeper.rested([number, *TEXT])
        assert state["right"] and state["hit"] in (0, len(TEXT) + 1)
    with pool_at(tmp_path, "a", large_pages=LARGE_PAGES) as a:
        a.connect(tmp_path / NAME)
        fill(a, OTHER)
        assert a.transfer_with_insert(NAME, OTHER) == len(OTHER)


@pytest.mark.parametrize("way", WAYS)
def test_a_sender_that_wakes_late_has_nothing_to_offer(
    sleeper: Sleeper, way: str, tmp_path: Path
) -> None:
    """Pages that were held for it are somebody else's; it writes into nobody's memory."""
    with pool_at(tmp_path, "a", large_pages=LARGE_PAGES) as a:
        sleeper.ask("connect", "a")
        sleeper.ask("fill", TEXT)
        sleeper.ask("sleep", OFFER)
        sleeper.tell("send", "a", TEXT)
        until(sleeper.sleeps)
        assert used_pages(a)
        give_up(a, way)
        assert not used_pages(a)
        fill(a, OTHER)
        sleeper.wake()
        assert "the transfer ended" in sleeper.answer()
        lease = a.match(OTHER)
        assert holds_right(a, lease, OTHER) and lease.hit_tokens == len(OTHER)
        a.free_mem(lease)
        assert a.match(TEXT).addresses == ()
        assert sleeper.rested(TEXT)["hit"] == len(TEXT)

        if way == WAYS[1]:
            sleeper.ask("connect", "a")
        assert sleeper.ask("send", "a", TEXT) == ""
        lease = a.match(TEXT)
        assert holds_right(a, lease, TEXT) and lease.hit_tokens == len(TEXT)


def test_a_sender_that_sleeps_during_the_copy_keeps_nobody_waiting(
    sleeper: Sleeper, tmp_path: Path
) -> None:
    """What it has offered can be read while it is stopped; it hears of that when it wakes."""
    with pool_at(tmp_path, "a", large_pages=LARGE_PAGES) as a:
        sleeper.ask("connect", "a")
        sleeper.ask("fill", TEXT)
        assert sleeper.ask("send", "a", TEXT) == ""
        sleeper.ask("fill", OTHER)
        sleeper.tell("send", "a", OTHER)
        os.kill(sleeper.process.pid, signal.SIGSTOP)
        until(sleeper.sleeps)
        lease = a.match(OTHER)  # it may have come, or not yet
        assert holds_right(a, lease, OTHER)
        a.free_mem(lease)
        sleeper.wake()
        assert sleeper.answer() == ""
        assert a.match(OTHER).hit_tokens == len(OTHER)
