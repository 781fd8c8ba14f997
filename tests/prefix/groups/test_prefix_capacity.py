"""What is said to fit does fit, and one more does not; counted for `kvell plan` too."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix.groups.capacity import (
    large_pages_needed,
    longest_request,
    pool_bytes_for,
    request_bytes,
    requests_that_fit,
)
from tests.depth import few
from tests.pages.pools import Chunk, confined, group, literal, pool_of
from tests.prefix.story import Story

LAYOUT = pool_of(10, group(4, 3), group(4, 2, window=9))
layouts = st.builds(
    lambda sharing, num, size, per, window: sharing(
        pool_of(num, group(size, per[0]), group(size, per[1], window))
    ),
    st.sampled_from([replace, literal, confined]),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.one_of(st.integers(1, 20), st.integers(1, 20).map(Chunk)),
)


def resized(layout: Layout, num_large: int) -> Layout:
    """A pool of so many large pages, cut into shares again if it was."""
    other = replace(layout, num_large_pages=num_large)
    return other if layout.quota_large_pages is None else confined(other)


def test_one_request_counted_by_hand() -> None:
    """30 tokens: 8 full pages in 3 large ones; a window of 9 tokens and one to come: 4 pages,
    which may straddle a third large one."""
    assert large_pages_needed(LAYOUT, 30) == 3 + 3
    assert request_bytes(LAYOUT, 30) == 8 * 128 + 4 * 192
    assert pool_bytes_for(LAYOUT, 30) == 6 * LAYOUT.large_page_bytes


def test_in_equal_shares_the_neediest_group_decides_for_all() -> None:
    """3 large pages of 3 full pages want 7 to 9 of each kind: 4 large pages of 2 sliding ones."""
    layout = confined(LAYOUT)
    assert layout.quota_large_pages == (4, 6)
    assert large_pages_needed(layout, 30) == 3 + 4
    assert longest_request(layout, 1000) == 48
    assert longest_request(LAYOUT, 1000) == 84


def test_requests_share_large_pages_of_a_group() -> None:
    """Two requests: 16 full pages in 6 large ones, 8 sliding in 4, which may straddle a fifth."""
    assert large_pages_needed(LAYOUT, 30, requests=2) == 6 + 5


def test_a_chunked_request_is_counted_before_its_chunk_ends() -> None:
    """At 32 tokens a chunk of 8 keeps nothing; a step before it held 8 tokens, 2 or 3 pages."""
    layout = pool_of(10, group(4, 3), group(4, 2, Chunk(8)))
    assert large_pages_needed(layout, 32) == 3 + 2


def test_a_prefill_chunk_costs_windows_more() -> None:
    assert large_pages_needed(LAYOUT, 30, chunk_tokens=16) == 3 + 4


@given(layouts, st.integers(1, 60))
def test_the_longest_request_fits_and_a_longer_one_does_not(layout: Layout, limit: int) -> None:
    longest = longest_request(layout, limit)
    assert 0 <= longest <= limit
    if longest:
        assert large_pages_needed(layout, longest) <= layout.num_large_pages
    if longest < limit:
        assert large_pages_needed(layout, longest + 1) > layout.num_large_pages


@given(layouts, st.integers(1, 60))
def test_the_number_of_requests_is_the_largest_that_fits(layout: Layout, tokens: int) -> None:
    count = requests_that_fit(layout, tokens)
    assert large_pages_needed(layout, tokens, count) <= layout.num_large_pages
    assert large_pages_needed(layout, tokens, count + 1) > layout.num_large_pages


@given(layouts, st.integers(1, 60), st.integers(1, 8))
def test_the_pool_said_to_be_needed_is_enough_and_not_too_much(
    layout: Layout, tokens: int, chunk: int
) -> None:
    num_large = pool_bytes_for(layout, tokens, chunk) // layout.large_page_bytes
    assert longest_request(resized(layout, num_large), tokens, chunk) == tokens
    smaller = resized(layout, num_large - 1)
    assert large_pages_needed(smaller, tokens, 1, chunk) > num_large - 1


@few()
@given(layouts, st.integers(1, 4))
def test_a_real_core_serves_the_longest_request(layout: Layout, chunk: int) -> None:
    longest = longest_request(layout, 60, chunk)
    story = Story(layout)
    handle = story.open([7] * longest) if longest else 0
    computed = 0
    while computed < longest:
        computed = min(longest, computed + chunk)
        story.compute(handle, computed)
    assert computed == longest


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_limits_are_kept(limit: int) -> None:
    assert longest_request(LAYOUT, limit) == limit
    assert requests_that_fit(LAYOUT, 4, limit=limit) == min(limit, 9)


FULL = GroupSpec("full", GroupKind.FULL, (5,), 64, 16, 1024, 6, 0)
SLIDING = GroupSpec("sliding", GroupKind.SLIDING, (0, 1), 32, 16, 1024, 6, 40)


def layout(large_pages: int, *groups: GroupSpec) -> Layout:
    return Layout(groups or (FULL, SLIDING), 6 * 1024, large_pages)


@pytest.mark.parametrize(("large_pages", "requests"), [(1, 0), (2, 1), (3, 1), (4, 3), (10, 7)])
def test_requests_that_fit(large_pages: int, requests: int) -> None:
    assert requests_that_fit(layout(large_pages), 49) == requests
