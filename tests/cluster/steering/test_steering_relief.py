"""Requests that leave an instance without memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.steering.relief import ROOM_PART, MemoryView, MovableView, loan, relief

FULL = MemoryView("full", 0, 50, 1000)
EMPTY = MemoryView("empty", 0, 900, 1000)
TWO = [MovableView("old", 100), MovableView("young", 100)]


def test_the_youngest_leaves_for_where_there_is_most_room() -> None:
    less = replace(EMPTY, instance_id="less", free_bytes=600)
    assert relief(FULL, [less, EMPTY], TWO) == ("young", "empty")


def test_a_request_that_does_not_fit_lets_an_older_one_go() -> None:
    assert relief(FULL, [EMPTY], [TWO[0], MovableView("young", 700)]) == ("old", "empty")


def test_requests_that_wait_are_a_shortage_too() -> None:
    source = replace(FULL, free_bytes=300)
    assert relief(source, [EMPTY], TWO) is None
    assert relief(replace(source, waiting=1), [EMPTY], TWO) == ("young", "empty")


@pytest.mark.parametrize(
    ("source", "other"),
    [
        (replace(FULL, leaving=1), EMPTY),
        (FULL, replace(EMPTY, coming=1)),
        (FULL, replace(EMPTY, waiting=1)),
        (FULL, replace(EMPTY, free_bytes=340)),
        (replace(FULL, waiting=3, free_bytes=750), EMPTY),
    ],
    ids=["one leaves", "one comes", "others wait there", "no room is left", "it has as much"],
)
def test_nobody_leaves(source: MemoryView, other: MemoryView) -> None:
    assert relief(source, [other], TWO) is None


def test_the_only_request_stays() -> None:
    assert relief(FULL, [EMPTY], TWO[:1]) is None
    assert relief(FULL, [], TWO) is None


@given(
    waiting=st.integers(0, 2),
    free=st.lists(st.integers(0, 1000), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 500), max_size=5),
)
def test_what_left_has_no_reason_to_come_back(
    waiting: int, free: list[int], sizes: list[int]
) -> None:
    """Requests do not go to and fro: afterwards the other has more room than was left here."""
    source, *others = (MemoryView(f"i{n}", 0, one, 1000) for n, one in enumerate(free))
    source = replace(source, waiting=waiting)
    movable = [MovableView(f"r{n}", size) for n, size in enumerate(sizes)]
    move = relief(source, others, movable)
    if move is None:
        return
    size = next(one.size_bytes for one in movable if one.request_id == move[0])
    target = next(one for one in others if one.instance_id == move[1])
    after = replace(target, free_bytes=target.free_bytes - size)
    back = replace(source, waiting=0, free_bytes=source.free_bytes + size)
    assert after.free_bytes * ROOM_PART >= after.pool_bytes
    assert relief(after, [back], [*movable, *movable]) is None


LONG = MovableView("long", 950, 100)


def test_the_longest_request_lies_in_part_where_there_is_most_room() -> None:
    """As many sections as make both alike: 4 of 9."""
    assert loan(FULL, EMPTY, [MovableView("short", 60, 100), LONG]) == ("long", 4)


@pytest.mark.parametrize(
    ("source", "target", "movable"),
    [
        (replace(FULL, leaving=1), EMPTY, [LONG]),
        (replace(FULL, free_bytes=500), EMPTY, [LONG]),
        (FULL, replace(EMPTY, free_bytes=340), [LONG]),
        (FULL, replace(EMPTY, free_bytes=200), [LONG]),
        (FULL, EMPTY, []),
        (FULL, EMPTY, [replace(LONG, block_bytes=0)]),
        (FULL, EMPTY, [replace(LONG, size_bytes=199)]),
    ],
    ids=[
        "one leaves",
        "it is not short",
        "a section has no room",
        "none is to spare",
        "it has no request",
        "none can be lent",
        "its last section stays",
    ],
)
def test_nothing_is_lent(
    source: MemoryView, target: MemoryView, movable: list[MovableView]
) -> None:
    assert loan(source, target, movable) is None


@given(
    free=st.integers(0, 1000),
    there=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 1000), max_size=5),
    block=st.integers(1, 200),
)
def test_a_loan_leaves_room_on_both_sides(
    free: int, there: int, sizes: list[int], block: int
) -> None:
    source, target = MemoryView("s", 1, free, 1000), MemoryView("t", 0, there, 1000)
    movable = [MovableView(f"r{n}", size, block) for n, size in enumerate(sizes)]
    found = loan(source, target, movable)
    if found is None:
        return
    name, count = found
    lent_bytes = count * block
    assert there - lent_bytes >= 1000 // ROOM_PART
    assert there - lent_bytes >= free + lent_bytes, "the creditor is not worse off afterwards"
    size = next(one.size_bytes for one in movable if one.request_id == name)
    assert size == max(sizes) and lent_bytes + block <= size
