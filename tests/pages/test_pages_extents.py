"""Runs of pages inside large pages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.extents import Extent, extents_of
from kvell.vocabulary import LogicalLargePage

runs_of_pages = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda r: range(r[0], r[0] + r[1])),
    max_size=6,
).map(lambda runs: [page for run in runs for page in run])


def pages_of(extent: Extent, per_large: int) -> list[int]:
    first = extent.large_page * per_large + extent.first_index
    return list(range(first, first + extent.num_pages))


@given(runs_of_pages, st.integers(1, 8))
def test_extents_name_the_same_pages_in_the_same_order(pages: list[int], per_large: int) -> None:
    extents = list(extents_of(pages, per_large))
    assert [p for e in extents for p in pages_of(e, per_large)] == pages


@given(runs_of_pages, st.integers(1, 8))
def test_no_extent_leaves_its_large_page(pages: list[int], per_large: int) -> None:
    for extent in extents_of(pages, per_large):
        assert 0 <= extent.first_index < extent.first_index + extent.num_pages <= per_large


@given(runs_of_pages, st.integers(1, 8))
def test_extents_are_as_long_as_they_can_be(pages: list[int], per_large: int) -> None:
    extents = list(extents_of(pages, per_large))
    for left, right in itertools.pairwise(extents):
        joined = left.large_page == right.large_page
        assert not (joined and left.first_index + left.num_pages == right.first_index)


def test_a_run_over_two_large_pages_is_cut_between_them() -> None:
    assert list(extents_of([2, 3, 4, 5], 4)) == [
        Extent(LogicalLargePage(0), 2, 2),
        Extent(LogicalLargePage(1), 0, 2),
    ]


def test_no_pages_no_extents() -> None:
    assert list(extents_of([], 4)) == []


@given(st.integers(0, 3), st.integers(2, 9), st.data())
def test_splitting_keeps_every_page(first: int, length: int, data: st.DataObject) -> None:
    whole = Extent(LogicalLargePage(5), first, length)
    cut = data.draw(st.integers(1, length - 1))
    head, tail = whole.split(cut)
    assert head.num_pages == cut
    assert pages_of(head, 16) + pages_of(tail, 16) == pages_of(whole, 16)


@pytest.mark.parametrize("cut", [-1, 0, 3, 4])
def test_neither_half_may_be_empty(cut: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut 3 pages after {cut}"):
        Extent(LogicalLargePage(0), 0, 3).split(cut)
