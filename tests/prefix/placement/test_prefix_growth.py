"""What a holder can get: grow, largest, fits, held pages; on both cores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import some
from tests.pages.pools import group, pool_of
from tests.prefix.story import Story, ints


def test_growth_answers_with_new_pages_only() -> None:
    story = Story(pool_of(8, group(4, 2), group(2, 4, window=5)))
    handle = story.open([1] * 12)
    assert [row[1:3] for row in story.grow(handle, 5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [row[1:3] for row in story.grow(handle, 6)] == []
    assert [row[1:3] for row in story.grow(handle, 9)] == [(0, 2), (1, 3), (1, 4)]
    assert story.grow(handle, 3) == [], "never shrinks"


def test_held_pages_are_hits_and_growth_in_order_of_position() -> None:
    story = Story(pool_of(8, group(4, 2)))
    story.serve([1] * 9)
    handle = story.open([1] * 14)
    new = story.grow(handle, 14)
    held = story.core.held_pages(handle)
    assert held.dtype == np.int32
    assert held[:, :3].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]]
    assert [(g, p, page) for _, g, p, page in held[2:].tolist()] == [row[1:] for row in new]


def test_windows_give_pages_back_while_they_move() -> None:
    """A window of 9 over pages of 4: never more than 3 pages while decoding."""
    story = Story(pool_of(12, group(4, 1, window=9)))
    handle = story.open([1] * 8, expected=60)
    story.compute(handle, 8)
    for token in range(40):
        story.decode(handle, token)
        assert len(story.pages(handle, 0)) <= 3
    assert min(story.pages(handle, 0)) == (48 - 9) // 4


def test_fits_counts_what_others_still_need() -> None:
    """Ten pages: a long prompt holds one and needs seven more; three are left for others."""
    story = Story(pool_of(10, group(4, 1)))
    long = story.open([1] * 32)
    story.compute(long, 4)
    short = story.open([2] * 12)
    nobody = ints()
    assert story.core.fits(short, 12, 4, nobody, nobody)
    assert not story.core.fits(short, 12, 4, ints([long]), ints([33]))
    assert story.core.fits(short, 8, 4, ints([long]), ints([32]))


def test_fits_counts_the_chunk_in_sliding_groups() -> None:
    story = Story(pool_of(6, group(4, 1, window=9)))
    handle = story.open([1] * 100)
    nobody = ints()
    assert story.core.fits(handle, 100, 4, nobody, nobody)
    assert not story.core.fits(handle, 100, 16, nobody, nobody)


def test_fits_changes_nothing() -> None:
    story = Story(pool_of(6, group(4, 1)))
    handle = story.open([1] * 20)
    before = story.check()
    story.core.fits(handle, 20, 4, ints(), ints())
    story.core.largest(handle, 20)
    story.peek([1] * 20)
    assert story.check() == before


def test_cached_pages_count_as_room() -> None:
    story = Story(pool_of(5, group(4, 1)))
    story.serve([1] * 20)
    handle = story.open([2] * 20)
    assert story.core.largest(handle, 20) == 20
    assert story.core.fits(handle, 20, 20, ints(), ints())


def test_ones_own_hit_is_not_evicted_for_ones_own_growth() -> None:
    story = Story(pool_of(5, group(4, 1)))
    story.serve([1] * 12)
    handle = story.open([1] * 12 + [2] * 12)
    hit = story.pages(handle, 0)
    assert story.core.largest(handle, 24) == 20
    story.compute(handle, 20)
    assert {p: story.pages(handle, 0)[p] for p in hit} == hit


@pytest.mark.parametrize("release", [True, False])
def test_appended_tokens_are_published_like_the_prompt(release: bool) -> None:
    story = Story(pool_of(9, group(4, 1)))
    story.next_step()
    handle = story.open([1, 2, 3])
    story.compute(handle, 3)
    story.core.append(ints([handle, handle]), ints([4, 5]))
    story.compute(handle, 5)
    if release:
        story.close(handle)
    assert story.peek([1, 2, 3, 4, 9]) == 4
    assert story.peek([1, 2, 3, 5, 9]) == 3, "what two pages begin with is copied"


@some()
@given(
    st.integers(1, 8),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([1, 4, 9]),
    st.integers(1, 40),
)
def test_largest_is_exactly_what_growth_grants(
    num_large: int, per_large: tuple[int, int], window: int, wanted: int
) -> None:
    story = Story(pool_of(num_large, group(4, per_large[0]), group(2, per_large[1], window)))
    handle = story.open([1] * wanted)
    reach = story.core.largest(handle, wanted)
    assert 0 <= reach <= wanted
    if reach < wanted:
        assert story.core.grow(ints([handle]), ints([reach + 1]))[0] == 0
    assert story.core.grow(ints([handle]), ints([reach]))[0] == 1
