"""The bench's bound: small schedules worked out by hand, and real policies below it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.replay.foresight import Foresight, Life, lives_of
from kvell.memory import GroupKind, GroupSpec, Layout
from kvell.simulator.traces.rows import TraceRow
from tests.pages.pools import group, state
from tests.simulator.replays import busy_rows, layout_of, make_replay, row

PAGE_TOKENS = 4
BLOCK_BYTES = 1024
"""A block of these traces is a page."""
FULL = replace(group(PAGE_TOKENS, 1), page_stride_bytes=BLOCK_BYTES)
FIRST, LATER = Life(1, 1, 5), Life(9, 9, 12)


def bound(
    room: float, *groups: GroupSpec, rows: Sequence[TraceRow], lives: Sequence[Life]
) -> float:
    """The most tokens that hit with ``room`` pages of full attention free at every step."""
    free_bytes = np.full(100, int(room * BLOCK_BYTES), np.int64)
    return Foresight([FULL, *groups], rows, lives, free_bytes).hit_tokens()


def asked_twice(blocks: int = 3, output: int = 2) -> list[TraceRow]:
    return [row(4 * blocks + 1, output, list(range(blocks))) for _ in range(2)]


@pytest.mark.parametrize(("room", "hit"), [(0, 0), (1, 4), (1.5, 6), (3, 12), (9, 12)])
def test_attention_hits_as_many_blocks_as_there_is_room_for(room: float, hit: float) -> None:
    assert bound(room, rows=asked_twice(), lives=[FIRST, LATER]) == pytest.approx(hit)


def test_what_somebody_runs_with_takes_no_room() -> None:
    meanwhile = Life(3, 3, 12)
    assert bound(0, rows=asked_twice(), lives=[FIRST, meanwhile]) == pytest.approx(12)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    rows = [row(8, 1, [1, 2]), row(8, 1, [1, 2])]
    assert bound(9, rows=rows, lives=[FIRST, LATER]) == pytest.approx(7)


def test_room_is_for_what_will_be_used_only() -> None:
    """Ten prompts come and go, one returns: only that one is kept."""
    others = [row(13, 2, list(range(10 * n, 10 * n + 3))) for n in range(1, 10)]
    rows = [*asked_twice()[:1], *others, *asked_twice()[:1]]
    lives = [Life(n + 1, n + 1, n + 2) for n in range(10)] + [Life(30, 30, 31)]
    assert bound(3, rows=rows, lives=lives) == pytest.approx(12)


def test_two_that_return_share_the_room_while_both_wait() -> None:
    rows = [*asked_twice()[:1], row(13, 2, [7, 8, 9])] * 2
    lives = [Life(1, 1, 2), Life(1, 1, 2), Life(5, 5, 6), Life(6, 6, 7)]
    assert bound(3, rows=rows, lives=lives) == pytest.approx(12)
    assert bound(4, rows=rows, lives=lives) == pytest.approx(16)


@pytest.mark.parametrize(("room", "hit"), [(0, 0), (2.5, 6), (5, 12)])
def test_a_state_takes_room_beside_the_attention_that_it_belongs_to(
    room: float, hit: float
) -> None:
    """It takes two pages; the linear program may keep a part of it, hence only a bound."""
    own = state(2, 1, page_stride_bytes=BLOCK_BYTES)
    assert bound(room, own, rows=asked_twice(), lives=[FIRST, LATER]) == pytest.approx(hit)


def test_a_state_takes_room_while_its_request_runs_too() -> None:
    own = state(2, 1, page_stride_bytes=BLOCK_BYTES)
    meanwhile = Life(3, 3, 12)
    assert bound(1, own, rows=asked_twice(), lives=[FIRST, meanwhile]) == pytest.approx(6)
    assert bound(2, own, rows=asked_twice(), lives=[FIRST, meanwhile]) == pytest.approx(12)


def test_who_resumed_beyond_a_state_did_not_compute_it_again() -> None:
    """The second hits all three blocks or computes them; the third wants one of them."""
    own = state(4, 1, page_stride_bytes=BLOCK_BYTES)
    rows = [*asked_twice(), row(5, 2, [0])]
    lives = [FIRST, LATER, Life(20, 20, 21)]
    both = 12 + 4
    assert bound(3 + 4 + 4, own, rows=rows, lives=lives) == pytest.approx(both)
    assert bound(3 + 4, own, rows=rows, lives=lives) < both - 1


def test_a_window_takes_room_once_its_request_has_left_it_behind() -> None:
    """A window of five tokens resumes from four: the last block. A long answer leaves it behind
    while the request runs; with one token of answer it is still held."""
    own, meanwhile = replace(FULL, kind=GroupKind.SLIDING, window_tokens=5), Life(9, 9, 12)
    running = Life(1, 1, 20)
    left, held = asked_twice(output=19), asked_twice(output=1)
    assert bound(0, own, rows=left, lives=[running, meanwhile]) == pytest.approx(0)
    assert bound(1, own, rows=left, lives=[running, meanwhile]) == pytest.approx(12)
    assert bound(0, own, rows=held, lives=[Life(1, 8, 20), meanwhile]) == pytest.approx(12)


def test_a_chunk_that_ended_with_the_prefix_takes_no_room() -> None:
    own = replace(FULL, kind=GroupKind.CHUNKED, window_tokens=4)
    assert bound(3, own, rows=asked_twice(), lives=[FIRST, LATER]) == pytest.approx(12)


def layouts() -> list[Layout]:
    return [
        layout_of((0, 1), large_pages=30),
        layout_of((0, 1), (6, 1), large_pages=40),
        layout_of((0, 1), (9, 3), large_pages=30),
    ]


@pytest.mark.parametrize("layout", layouts(), ids=["full", "window", "wide"])
@pytest.mark.parametrize("seed", range(6))
def test_no_run_hits_more(layout: Layout, seed: int) -> None:
    """The bound of each run's own schedule, in a pool small enough to evict."""
    rows = [replace(each, output_tokens=1) for each in busy_rows(seed, count=60)]
    run = make_replay(layout, rows)
    needed = [0, *(sum(g.needed_bytes for g in s.groups) for s in run.means.samples)]
    free_bytes = layout.pool_bytes - np.asarray(needed, np.int64)
    most = Foresight(layout.groups, rows, lives_of(run), free_bytes).hit_tokens()
    assert run.report()["preemptions"] == 0
    assert 0 < run.totals().hit_tokens <= most + 1e-6
