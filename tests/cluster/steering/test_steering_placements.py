"""Where the sections of a request go that is longer than one instance's memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.steering.placements import (
    Placement,
    lendable_sections,
    local_sections,
    longest_with,
    placement,
)
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.vocabulary import RequestId
from tests.reports import Memory, facts

BLOCK = 100
"""Bytes of a section."""
NAME = RequestId("r")


def view(name: str, free: float, pool: float = 4, waiting: int = 0) -> Memory:
    return Memory(name, waiting, int(free * BLOCK), int(pool * BLOCK))


def placed(
    blocks: int,
    others: list[Memory],
    most_local: int = 4,
    home_free: float = 4,
    shared: dict[str, int] | None = None,
) -> Placement:
    home = view("home", home_free)
    return placement(NAME, blocks, most_local, home, others, BLOCK, shared or {})


def counts(found: Placement) -> dict[str, int]:
    return {one.inst_id: one.num_blocks for one in found}


def test_what_has_room_stays() -> None:
    found = placed(6, [view("a", 4), view("b", 4)])
    assert counts(found) == {"home": 4, "a": 1, "b": 1}
    assert [one.local for one in found] == [True, False, False]
    assert {one.req_id for one in found} == {NAME}


def test_the_instance_with_most_memory_lends_most() -> None:
    assert counts(placed(8, [view("a", 1.5), view("b", 9, 9), view("c", 4)])) == {
        "home": 4,
        "b": 4,
        "c": 0,
        "a": 0,
    }


def test_all_become_alike_before_one_is_emptied() -> None:
    others = [view("a", 8, 8), view("b", 8, 8)]
    assert counts(placed(16, others)) == {"home": 4, "a": 6, "b": 6}
    assert counts(placed(18, others)) == {"home": 4, "a": 7, "b": 7}


def test_less_stays_where_others_use_the_memory() -> None:
    assert counts(placed(6, [view("a", 4), view("b", 4)], home_free=2.5))["home"] == 2
    assert counts(placed(5, [view("a", 4), view("b", 4)], home_free=0))["home"] == 1


def test_more_stays_than_is_free_where_others_lack_memory_too() -> None:
    """The request waits at home for what others use there."""
    assert counts(placed(6, [view("a", 3)], home_free=0)) == {"home": 3, "a": 3}


def test_nobody_lends_what_it_lacks() -> None:
    assert placed(9, [view("a", 2), view("b", 2)]) == ()
    assert placed(5, []) == ()
    assert placed(5, [view("a", 4, waiting=1)]) == (), "its own requests wait for memory"
    assert placed(5, [view("a", 4)], most_local=0) == ()


def test_what_lies_there_already_takes_no_room() -> None:
    others = [view("a", 2), view("b", 2)]
    assert placed(9, others) == ()
    assert counts(placed(9, others, shared={"a": 3})) == {"home": 4, "a": 4, "b": 1}
    assert counts(placed(9, others, shared={"gone": 5})) == {"gone": 5, "home": 4, "a": 0, "b": 0}
    assert counts(placed(5, [], shared={"a": 3})) == {"a": 3, "home": 2}


def test_a_part_of_every_pool_is_never_lent() -> None:
    assert lendable_sections(32 * BLOCK, BLOCK) == 31
    assert lendable_sections(64 * BLOCK, BLOCK) == 62
    assert lendable_sections(BLOCK, BLOCK) == 0
    assert placed(8, [view("a", 4)]) == (), "of four it keeps one"


def test_reach_is_what_all_hold_together() -> None:
    limits = facts(max_model_len=1088, reach_tokens=8192, section_bytes=512 * 10)
    assert local_sections(limits, limits.lengths()) == 2
    assert longest_with(limits, limits.lengths(), []) == 1088
    assert longest_with(limits, limits.lengths(), [1088 * 10]) == (2 + 2) * 512
    assert longest_with(limits, limits.lengths(), [1088 * 10] * 5) == 12 * 512
    assert longest_with(limits, limits.lengths(), [1088 * 10] * 50) == 8192


@pytest.mark.parametrize(
    "limits",
    [
        facts(),
        facts(max_model_len=1088),
        facts(max_model_len=1088, reach_tokens=8192),
        facts(max_model_len=300, reach_tokens=8192, section_bytes=9),
    ],
)
def test_who_borrows_nothing_reaches_no_further(limits: InstanceFacts) -> None:
    assert longest_with(limits, limits.lengths(), [1 << 30] * 9) == limits.max_model_len


@given(
    blocks=st.integers(1, 40),
    most_local=st.integers(1, 8),
    home_free=st.integers(0, 8),
    others=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1)), max_size=6),
    there=st.dictionaries(st.sampled_from(["i0", "i1", "i9"]), st.integers(1, 9)),
)
def test_a_plan_has_room_for_all_of_a_request(
    blocks: int,
    most_local: int,
    home_free: int,
    others: list[tuple[int, int]],
    there: dict[str, int],
) -> None:
    views = [view(f"i{n}", free, 20, waiting) for n, (free, waiting) in enumerate(others)]
    known = sum(there.values())
    shared = there if known < blocks else {}
    known = sum(shared.values())
    found = placed(blocks, views, most_local, home_free, shared)
    lendable = {
        one.instance_id: min(one.free_bytes // BLOCK, lendable_sections(one.pool_bytes, BLOCK))
        for one in views
        if not one.waiting
    }
    if not found:
        assert blocks - known - most_local > sum(lendable.values())
        return
    home, *away = found
    assert home.local and not any(one.local for one in away)
    assert 1 <= home.num_blocks <= most_local
    assert home.num_blocks + sum(one.num_blocks for one in away) >= blocks
    for one in away:
        there_already = shared.get(one.inst_id, 0)
        assert there_already <= one.num_blocks <= there_already + lendable.get(one.inst_id, 0)
    assert len({one.inst_id for one in away}) == len(away)
