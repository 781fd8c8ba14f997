"""How old a page beside used ones must be before it goes: as old as hits are many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.eviction.hit_share import HALVE_REQUESTS, HitShare

counts = st.integers(0, 1 << 20)


def share(*requests: tuple[int, int]) -> HitShare:
    made = HitShare()
    for hit_tokens, tokens in requests:
        made.note(hit_tokens, tokens)
    return made


@given(counts, counts)
def test_before_anybody_came_any_age_is_old(age: int, beside: int) -> None:
    assert share().is_old(age, beside)


@given(counts, counts)
def test_where_nothing_is_hit_any_age_is_old(age: int, beside: int) -> None:
    assert share((0, 100), (0, 7)).is_old(age, beside)


@pytest.mark.parametrize(("age", "old"), [(59, False), (60, True), (100, True)])
def test_an_age_is_old_from_the_part_that_was_hit(age: int, old: bool) -> None:
    assert share((50, 50), (10, 50)).is_old(age, 100) is old


@given(counts, counts, st.lists(st.tuples(counts, counts), max_size=5))
def test_who_is_older_is_old_if_the_younger_is(
    age: int, beside: int, requests: list[tuple[int, int]]
) -> None:
    made = share(*((min(hit, all_), all_) for hit, all_ in requests))
    assert not made.is_old(age, beside) or made.is_old(age + 1, beside)
    assert made.is_old(beside, beside)


def test_what_was_long_ago_counts_less() -> None:
    made = share(*[(100, 100)] * (HALVE_REQUESTS - 1))
    assert not made.is_old(50, 100)
    for _ in range(2 * HALVE_REQUESTS):
        made.note(0, 100)
    assert made.is_old(25, 100)
    assert not made.is_old(5, 100)
