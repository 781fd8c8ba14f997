"""The balloon by hand: where chunks come from, what moves, and what it costs."""

import numpy as np

from kvell.elastic.balloon import Balloon, Deflation, Inflation
from kvell.elastic.slots import SlotState
from kvell.elastic.tiling import tiling
from kvell.prefix.interface import CACHED, EMPTY, USED, LongInts
from tests.elastic.balloon_audit import audit_balloon

CHUNK = 4


class Kv:
    """Large pages of so many bytes over chunks of four, and a balloon that settles at once."""

    def __init__(self, num_chunks: int, large_page_bytes: int) -> None:
        self.balloon = Balloon(tiling(num_chunks, CHUNK, large_page_bytes), 3 * num_chunks)
        self.order: LongInts = np.full(self.balloon.tiling.num_large, EMPTY, np.int64)
        self.asked = 0

    def reclaim_order(self) -> LongInts:
        self.asked += 1
        return np.where(self.balloon.withheld, 0, self.order)

    def slot(self, count: int, step: int = 1) -> Deflation:
        plan = self.balloon.plan_slot(count, self.reclaim_order)
        assert plan is not None
        self.balloon.settle(plan, step)
        self.check()
        return plan

    def inflate(self, num_large: int, keep_chunks: int = 0) -> Inflation:
        plan = self.balloon.plan_inflation(num_large, keep_chunks)
        self.balloon.settle(plan)
        self.check()
        return plan

    def release(self, plan: Deflation, step: int = 1) -> None:
        self.balloon.slots.release(plan.start, plan.count, step)
        self.check()

    def check(self) -> None:
        withheld = np.flatnonzero(self.balloon.withheld).tolist()
        assert audit_balloon(self.balloon, self.balloon.chunk_at, withheld) == []


def test_empty_large_pages_give_their_chunks_from_the_top() -> None:
    kv = Kv(6, 2)
    plan = kv.slot(2)
    assert (plan.chunks, plan.withheld) == ((5, 4), (8, 9, 10, 11))
    assert plan.maps == ((0, 5), (1, 4))
    assert (kv.balloon.activation_chunks, kv.balloon.idle_chunks) == (2, 0)


def test_a_slot_that_was_freed_is_reused_and_nobody_is_asked() -> None:
    kv = Kv(6, 2)
    kv.release(kv.slot(3))
    asked = kv.asked
    again = kv.slot(2)
    assert (again.maps, again.chunks, kv.asked) == ((), (), asked)
    assert kv.balloon.idle_chunks == 1


def test_the_oldest_cached_goes_before_younger_ones_and_used_stays() -> None:
    kv = Kv(5, 4)
    kv.order[:] = [CACHED + 9, USED, CACHED + 3, EMPTY, CACHED + 5]
    assert kv.slot(3).chunks == (3, 2, 4)
    assert kv.balloon.plan_slot(2, kv.reclaim_order) is None
    assert kv.slot(1).chunks == (0,)


def test_a_chunk_goes_only_when_all_large_pages_over_it_may() -> None:
    kv = Kv(6, 6)  # bytes 0-5, 6-11, 12-17, 18-23 over chunks of four
    kv.order[:] = [EMPTY, EMPTY, USED, EMPTY]
    assert kv.slot(1).chunks == (5,)
    assert kv.slot(3).chunks == (2, 1, 0), "chunk 4 holds the end of what is used"
    assert kv.balloon.plan_slot(1, kv.reclaim_order) is None


def test_chunks_under_a_large_page_that_is_lost_anyway_go_first() -> None:
    kv = Kv(8, 16)
    assert kv.slot(1).withheld == (1,)
    kv.order[0] = EMPTY
    rest = kv.slot(3)
    assert (rest.chunks, rest.withheld) == ((6, 5, 4), ())


def test_inflation_gives_whole_large_pages_and_calls_no_device() -> None:
    kv = Kv(8, 16)
    plan = kv.slot(1)
    assert kv.inflate(1) == Inflation(), "it is in use"
    kv.release(plan, step=4)
    assert kv.inflate(5) == Inflation((7,), (1,), (0,))
    assert kv.balloon.activation_chunks == 0
    assert kv.balloon.slots.due(3) == () and kv.balloon.slots.due(4) == (0,)


def test_inflation_takes_no_more_than_it_needs_and_leaves_what_is_kept() -> None:
    kv = Kv(8, 4)
    kv.release(kv.slot(6))
    assert len(kv.inflate(2).chunks) == 2
    assert kv.balloon.idle_chunks == 4
    assert len(kv.inflate(9, keep_chunks=3).chunks) == 1
    assert kv.balloon.idle_chunks == 3


def test_the_highest_positions_go_first_and_the_lowest_slots_stay() -> None:
    kv = Kv(8, 4)
    kv.release(kv.slot(4))
    assert kv.inflate(2).retired == (3, 2)
    assert kv.slot(2).maps == ()


def test_a_chunk_may_move_into_a_larger_slot_while_its_old_mapping_is_stale() -> None:
    kv = Kv(4, 4)
    low, wall = kv.slot(1), kv.slot(1)
    kv.release(low)
    plan = kv.slot(3)
    assert (plan.start, plan.count, plan.retired) == (2, 3, (0,))
    assert 0 in kv.balloon.slots.positions(SlotState.STALE)
    assert wall.start == 1
    kv.balloon.on_unmapped([0])
    kv.check()


def test_more_than_there_are_addresses_for_is_refused() -> None:
    kv = Kv(2, 4)
    assert kv.balloon.plan_slot(7, kv.reclaim_order) is None
    assert kv.balloon.plan_slot(3, kv.reclaim_order) is None


def test_chunks_without_memory_are_nobodys_until_they_are_committed() -> None:
    balloon = Balloon(tiling(4, CHUNK, 8), 8, committed_chunks=1)
    assert balloon.uncommitted_chunks == (1, 2, 3)
    assert balloon.withheld.tolist() == [True, True]
    order = np.zeros(2, np.int64)
    assert balloon.plan_slot(2, lambda: order) is None
    assert balloon.plan_inflation(2) == Inflation()
    plan = balloon.plan_commit([1, 2])
    assert plan == Inflation((1, 2), (0,))
    balloon.settle(plan)
    assert balloon.withheld.tolist() == [False, True]


def test_large_pools_are_planned_without_looking_at_every_chunk_in_python() -> None:
    balloon = Balloon(tiling(20_000, CHUNK, 6), 40_000)
    order = np.full(balloon.tiling.num_large, EMPTY, np.int64)
    plan = balloon.plan_slot(5_000, lambda: order)
    assert plan is not None
    balloon.settle(plan, 1)
    balloon.slots.release(0, 5_000, 1)
    assert len(balloon.slots.segments) == 2
    back = balloon.plan_inflation(10)
    assert 10 <= len(back.restored) <= 12
    assert len(back.chunks) <= 16
