"""Pulls of one peer run in turn, those of several side by side, and each ends exactly once."""

import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from kvell.memory import GroupKind, LayerSpec, plan_layout
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.mover import REMEMBERED, THREADS, PullExecutor, StagedPull
from kvell.mempool.transports.page_copies import Bytes, Piece, parts_of, pieces_of
from kvell.mempool.transports.source import RIGHT_GONE, STOPPED
from kvell.pages.stages import BY_LAYER, stages_of
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


LAYERS = [
    *(LayerSpec(2 * i, GroupKind.FULL, 1, 8, 2) for i in range(6)),
    *(LayerSpec(2 * i + 1, GroupKind.SLIDING, 2, 8, 2, window_tokens=20) for i in range(5)),
    LayerSpec(11, GroupKind.STATE, 0, 0, 2, state_bytes=640),
]

GROUPS = plan_layout(LAYERS, 1 << 20).groups

PAGES = np.asarray(
    [(0, 1, 2), (0, 2, 3), (0, 9, 4), (1, 40, 41), (1, 41, 47), (2, 200, 201)], np.int32
)

TRANSFER = Transfer("a", 1, 1)


def pull_in(stages: int) -> Pull:
    return Pull(TRANSFER, PAGES, stages)


def bytes_of(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Every byte that is copied: from where to where, in order."""
    moved = ((one, byte) for one in pieces for byte in range(one.size_bytes))
    return sorted((one.source + byte, one.target + byte) for one, byte in moved)


def whole_bytes() -> list[tuple[int, int]]:
    """The same of all pages, without what only fills them up."""
    sizes = {i: (0, group.page_bytes) for i, group in enumerate(GROUPS)}
    return bytes_of(parts_of(GROUPS, PAGES, sizes))


def test_parts_of_pages_that_lie_together_are_no_piece_unless_they_are_whole() -> None:
    stride, part = GROUPS[0].page_stride_bytes, GROUPS[0].layer_page_bytes
    rows = PAGES[:2]
    assert pieces_of(GROUPS, rows) == [Piece(stride, 2 * stride, 2 * stride)]
    assert parts_of(GROUPS, rows, {0: (part, 2 * part)}) == [
        Piece(stride + part, 2 * stride + part, part),
        Piece(2 * stride + part, 3 * stride + part, part),
    ]
    assert parts_of(GROUPS, rows, {0: (0, stride)}) == pieces_of(GROUPS, rows)
    assert parts_of(GROUPS, rows, {1: (0, 8)}) == parts_of(GROUPS, rows, {}) == []


@pytest.mark.parametrize("most", [1, 2, 5, 8, 99])
def test_all_stages_and_the_rest_are_every_byte_once(most: int) -> None:
    staged, found = StagedPull(GROUPS, pull_in(most)), list[Piece]()
    for stage in range(most):
        found += staged.written(stage)
        assert staged.written(stage) == staged.written(-1) == []
    by_layer = [i for i, group in enumerate(GROUPS) if group.kind in BY_LAYER]
    assert {one.source for one in staged.rest()} == {PAGES[-1, 1] * GROUPS[2].page_stride_bytes}
    sizes = {i: (0, GROUPS[i].page_bytes) for i in by_layer}
    assert bytes_of(found) == bytes_of(parts_of(GROUPS, PAGES, sizes))


@pytest.mark.parametrize("told", [[], [0], [3], [1, 2], [0, 6], [7]])
def test_what_was_not_told_comes_with_the_rest(told: list[int]) -> None:
    staged, found = StagedPull(GROUPS, pull_in(8)), list[Piece]()
    for stage in told:
        found += staged.written(stage)
    found += staged.rest()
    assert set(bytes_of(found)) >= set(whole_bytes())
    assert len(set(bytes_of(found))) == len(bytes_of(found))


def test_nothing_of_a_stage_is_copied_before_it_is_written() -> None:
    stages = stages_of(GROUPS)
    for stage in range(len(stages)):
        allowed = [
            piece for one in stages[: stage + 1] for piece in parts_of(GROUPS, PAGES, one.parts)
        ]
        found = StagedPull(GROUPS, pull_in(8)).written(stage)
        assert bytes_of(found) == bytes_of(allowed)


def test_without_any_hint_pages_are_aggregated() -> None:
    assert StagedPull(GROUPS, pull_in(8)).rest() == pieces_of(GROUPS, PAGES)


def test_a_pull_of_nothing_has_no_pieces() -> None:
    staged = StagedPull(GROUPS, Pull(TRANSFER, PAGES[:0], 8))
    assert staged.written(3) == staged.rest() == []


def test_each_model_has_its_own_stages() -> None:
    named = [replace(group, model="small" if i else "") for i, group in enumerate(GROUPS)]
    staged = StagedPull(named, Pull(TRANSFER, PAGES[3:5], 5))
    assert len(staged.written(0)) == 2, "a layer of each of its pages"


class Kept(Source):
    """A source that answers at once, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__("a")
        self.asked: list[list[Piece]] = []
        self.came = threading.Semaphore(0)
        self.problem = ""

    def bring(self, number: int, pieces: object, target: Bytes, stop: threading.Event) -> str:
        self.asked.append(list(pieces))  # type: ignore[call-overload]
        self.came.release()
        return self.problem

    def wait(self) -> None:
        assert self.came.acquire(timeout=PATIENCE_SECONDS)


def staged(moves: Moves, number: int, source: Source | None) -> Transfer:
    transfer = Transfer("a", 1, number)
    rows = np.asarray([(0, 1, 2), (0, 2, 3)], np.int32)
    moves.mover.pull(Pull(transfer, rows, 8), source)
    return transfer


def test_a_stage_is_brought_when_it_is_written_and_the_rest_ends_it(moves: Moves) -> None:
    source = Kept()
    transfer = staged(moves, 1, source)
    assert moves.ends.empty() and not source.asked
    moves.mover.written(transfer, 0)
    source.wait()
    assert moves.ends.empty()
    moves.mover.written(transfer, 0)
    moves.mover.rest(transfer)
    assert moves.end() == (1, "")
    assert [len(pieces) for pieces in source.asked] == [1 if LAYOUT.groups[0].layers else 0, 0]
    assert moves.mover.copied_bytes == 2 * LAYOUT.groups[0].page_bytes


def test_what_is_written_before_the_pull_begins_comes_at_once(moves: Moves) -> None:
    source, transfer = Kept(), Transfer("a", 1, 1)
    moves.mover.written(transfer, 0)
    staged(moves, 1, source)
    source.wait()
    moves.mover.rest(transfer)
    assert moves.end() == (1, "")
    assert len(source.asked) == 2


def test_so_many_hints_are_remembered(moves: Moves) -> None:
    source = Kept()
    for number in range(REMEMBERED + 1):
        moves.mover.written(Transfer("a", 1, number), 0)
    for number in (0, 1):
        moves.mover.rest(staged(moves, number, source))
        assert moves.end() == (number, "")
    assert len(source.asked) == 3, "the oldest hint was forgotten, and all came with the rest"


def test_a_pull_that_waits_for_its_stages_takes_no_thread_and_no_turn(moves: Moves) -> None:
    waiting = [staged(moves, number, Source("a")) for number in range(20)]
    source = Kept()
    moves.pull(99, source)
    assert moves.end() == (99, "")
    for transfer in waiting:
        moves.mover.stop(transfer)
    assert sorted(moves.end() for _ in waiting) == [(number, STOPPED) for number in range(20)]


def test_a_problem_ends_it_once_and_nothing_is_written_afterwards(moves: Moves) -> None:
    source = Kept()
    source.problem = RIGHT_GONE
    transfer = staged(moves, 1, source)
    moves.mover.written(transfer, 0)
    assert moves.end() == (1, RIGHT_GONE)
    moves.mover.written(transfer, 0)
    moves.mover.rest(transfer)
    moves.mover.stop(transfer)
    moves.pull(2, source)
    assert moves.end() == (2, RIGHT_GONE)
    assert len(source.asked) == 2 and moves.mover.copied_bytes == 0


def test_a_stage_behind_a_slow_one_is_not_brought_once_it_has_failed(moves: Moves) -> None:
    source = Source("a")
    transfer = staged(moves, 1, source)
    moves.mover.written(transfer, 0)
    assert source.began.get(timeout=PATIENCE_SECONDS) == 1
    moves.mover.rest(transfer)
    source.answers.put("it broke")
    assert moves.end() == (1, "it broke")
    source.answers.put("")
    moves.pull(2, source)
    assert moves.end() == (2, "")
    assert source.began.get(timeout=PATIENCE_SECONDS) == 2 and source.began.empty()


def test_a_staged_pull_is_stopped_while_a_stage_comes(moves: Moves) -> None:
    source = Source("a")
    transfer = staged(moves, 1, source)
    moves.mover.written(transfer, 0)
    assert source.began.get(timeout=PATIENCE_SECONDS) == 1
    moves.mover.stop(transfer)
    assert moves.end() == (1, STOPPED)
    moves.mover.rest(transfer)


def test_a_staged_pull_of_a_sender_that_is_gone_ends_at_once(moves: Moves) -> None:
    staged(moves, 1, None)
    assert moves.end() == (1, "its sender has ended")


def test_closing_ends_pulls_that_wait_for_stages() -> None:
    moves = Moves()
    for number in range(3):
        staged(moves, number, Source(number))
    moves.mover.close()
    assert sorted(moves.end() for _ in range(3)) == [(number, STOPPED) for number in range(3)]
