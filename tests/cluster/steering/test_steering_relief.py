"""Requests that leave an instance without memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.instance_load import Movable
from kvell.cluster.steering.relief import ROOM_PART, relief
from tests.reports import Memory

FULL = Memory("full", 0, 50, 1000)
EMPTY = Memory("empty", 0, 900, 1000)
TWO = [Movable("old", 100), Movable("young", 100)]


def test_the_youngest_leaves_for_where_there_is_most_room() -> None:
    less = replace(EMPTY, instance_id="less", free_bytes=600)
    assert relief(FULL, [less, EMPTY], TWO) == ("young", "empty")


def test_a_request_that_does_not_fit_lets_an_older_one_go() -> None:
    assert relief(FULL, [EMPTY], [TWO[0], Movable("young", 700)]) == ("old", "empty")


def test_requests_that_wait_are_a_shortage_too() -> None:
    source = replace(FULL, free_bytes=300)
    assert relief(source, [EMPTY], TWO) is None
    assert relief(replace(source, waiting=1), [EMPTY], TWO) == ("young", "empty")


@pytest.mark.parametrize(
    ("source", "other"),
    [
        (replace(FULL, num_leaving=1), EMPTY),
        (FULL, replace(EMPTY, num_coming=1)),
        (FULL, replace(EMPTY, waiting=1)),
        (FULL, replace(EMPTY, free_bytes=340)),
        (replace(FULL, waiting=3, free_bytes=750), EMPTY),
    ],
    ids=["one leaves", "one comes", "others wait there", "no room is left", "it has as much"],
)
def test_nobody_leaves(source: Memory, other: Memory) -> None:
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
    source, *others = (Memory(f"i{n}", 0, one, 1000) for n, one in enumerate(free))
    source = replace(source, waiting=waiting)
    movable = [Movable(f"r{n}", size) for n, size in enumerate(sizes)]
    move = relief(source, others, movable)
    if move is None:
        return
    size = next(one.size_bytes for one in movable if one.request_id == move[0])
    target = next(one for one in others if one.instance_id == move[1])
    after = replace(target, free_bytes=target.free_bytes - size)
    back = replace(source, waiting=0, free_bytes=source.free_bytes + size)
    assert after.free_bytes * ROOM_PART >= after.pool_bytes
    assert relief(after, [back], [*movable, *movable]) is None
