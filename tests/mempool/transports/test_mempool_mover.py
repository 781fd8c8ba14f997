"""Pulls of one peer run in turn, those of several side by side, and each ends exactly once."""

import threading
from collections.abc import Hashable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np
import pytest

from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.mover import THREADS, PullExecutor
from kvell.mempool.transports.page_copies import Bytes, Piece
from kvell.mempool.transports.source import STOPPED
from tests.mempool.pools import layout_of

PATIENCE_SECONDS = 30.0
LAYOUT = layout_of("full", 4)
ROWS = np.asarray([(0, 1, 2), (0, 2, 3)], np.int32)


class Source:
    """A peer that answers when the test says so."""

    def __init__(self, lane: Hashable) -> None:
        self.lane = lane
        self.began: SimpleQueue[int] = SimpleQueue()
        self.answers: SimpleQueue[str | Exception] = SimpleQueue()
        self.pieces: list[Piece] = []
        self.running = 0

    def bring(
        self, number: int, pieces: Sequence[Piece], target: Bytes, stop: threading.Event
    ) -> str:
        self.running += 1
        assert self.running == 1
        self.pieces = list(pieces)
        self.began.put(number)
        try:
            while self.answers.empty():
                if stop.wait(0.01):
                    return STOPPED
            answer = self.answers.get()
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.running -= 1

    def close(self) -> None:
        pass


class Moves:
    """A mover, and what it said of each transfer."""

    def __init__(self) -> None:
        self.ends: SimpleQueue[tuple[int, str]] = SimpleQueue()
        memory = np.zeros(LAYOUT.pool_bytes, np.uint8)
        self.mover = PullExecutor(
            LAYOUT.groups, memory, lambda transfer, why: self.ends.put((transfer.number, why))
        )

    def pull(self, number: int, source: Source | None) -> Transfer:
        transfer = Transfer("a", 1, number)
        self.mover.pull(Pull(transfer, ROWS), source)
        return transfer

    def end(self) -> tuple[int, str]:
        return self.ends.get(timeout=PATIENCE_SECONDS)


@pytest.fixture
def moves() -> Iterator[Moves]:
    one = Moves()
    yield one
    one.mover.close()
    assert one.ends.empty()


def test_pages_that_lie_together_are_one_piece(moves: Moves) -> None:
    source, stride = Source("a"), LAYOUT.groups[0].page_stride_bytes
    source.answers.put("")
    moves.pull(1, source)
    assert moves.end() == (1, "")
    assert source.pieces == [Piece(stride, 2 * stride, 2 * stride)]
    assert moves.mover.copied_bytes == 2 * stride


def test_a_slow_peer_delays_only_itself(moves: Moves) -> None:
    slow, quick = Source("slow"), Source("quick")
    for number in (1, 2, 3):
        moves.pull(number, slow)
    assert slow.began.get(timeout=PATIENCE_SECONDS) == 1
    for number in (11, 12, 13):
        quick.answers.put("")
        moves.pull(number, quick)
        assert moves.end() == (number, "")
    assert slow.began.empty()
    for number in (1, 2, 3):
        slow.answers.put("")
        assert moves.end() == (number, "")


def test_as_many_peers_as_there_are_threads_come_at_once(moves: Moves) -> None:
    sources = [Source(number) for number in range(THREADS + 1)]
    for number, source in enumerate(sources):
        moves.pull(number, source)
    for number, source in enumerate(sources[:-1]):
        assert source.began.get(timeout=PATIENCE_SECONDS) == number
    assert sources[-1].began.empty()
    sources[3].answers.put("")
    assert moves.end() == (3, "")
    assert sources[-1].began.get(timeout=PATIENCE_SECONDS) == THREADS
    for source in sources[:3] + sources[4:]:
        source.answers.put("")
    assert {moves.end()[0] for _ in range(THREADS)} == {*range(THREADS + 1)} - {3}


def test_sources_of_one_lane_take_turns(moves: Moves) -> None:
    one, other = Source("mapped"), Source("mapped")
    moves.pull(1, one)
    moves.pull(2, other)
    assert one.began.get(timeout=PATIENCE_SECONDS) == 1
    assert other.began.empty()
    one.answers.put("")
    assert moves.end() == (1, "")
    assert other.began.get(timeout=PATIENCE_SECONDS) == 2
    other.answers.put("")
    assert moves.end() == (2, "")


def test_a_pull_is_stopped_under_way_or_before_its_turn(moves: Moves) -> None:
    source = Source("a")
    first, second = moves.pull(1, source), moves.pull(2, source)
    assert source.began.get(timeout=PATIENCE_SECONDS) == 1
    moves.mover.stop(second)
    moves.mover.stop(first)
    assert [moves.end(), moves.end()] == [(1, STOPPED), (2, STOPPED)]
    assert source.began.empty()
    assert moves.mover.copied_bytes == 0


def test_problems_and_faults_are_told_and_the_next_one_comes(moves: Moves) -> None:
    source = Source("a")
    source.answers.put("the right to read was revoked")
    source.answers.put(ZeroDivisionError("a bug"))
    source.answers.put("")
    for number in (1, 2, 3):
        moves.pull(number, source)
    assert moves.end() == (1, "the right to read was revoked")
    assert moves.end() == (2, "copying failed: a bug")
    assert moves.end() == (3, "")
    moves.pull(4, None)
    assert moves.end() == (4, "its sender has ended")


def test_closing_stops_all_and_waits() -> None:
    moves, sources = Moves(), [Source(number) for number in range(3)]
    for number in range(9):
        moves.pull(number, sources[number % 3])
    for number, source in enumerate(sources):
        assert source.began.get(timeout=PATIENCE_SECONDS) == number
    moves.mover.close()
    assert sorted(moves.end() for _ in range(9)) == [(number, STOPPED) for number in range(9)]
    assert not any(source.running for source in sources)
