"""Logical large pages keep their names while their bytes move."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.slots import SlotTable

exchanges = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12)


def test_until_something_moves_ids_are_what_they_were_without_a_copy() -> None:
    pages = np.asarray([9, 0, 5], np.int32)
    assert SlotTable(8).physical(pages, 3) is pages


def test_an_exchange_moves_whole_large_pages() -> None:
    slots = SlotTable(4)
    slots.exchange(0, 2)
    pages = np.asarray([0, 1, 2, 3, 6, 8], np.int32)
    assert slots.physical(pages, 3).tolist() == [6, 7, 8, 3, 0, 2]


@given(exchanges, st.integers(1, 6))
def test_slots_stay_a_permutation_and_follow_every_move(
    moves: list[tuple[int, int]], per_large: int
) -> None:
    slots, where = SlotTable(8), list(range(8))
    for first, second in moves:
        slots.exchange(first, second)
        where[first], where[second] = where[second], where[first]
    pages = np.arange(8 * per_large, dtype=np.int32)
    physical = slots.physical(pages, per_large)
    assert physical.dtype == np.int32
    assert sorted(physical.tolist()) == pages.tolist()
    assert physical.tolist() == [
        where[page // per_large] * per_large + page % per_large for page in pages.tolist()
    ]


def test_going_back_is_going_home() -> None:
    slots = SlotTable(3)
    slots.exchange(1, 2)
    slots.exchange(2, 1)
    assert slots.physical(np.asarray([4, 5], np.int32), 2).tolist() == [4, 5]
