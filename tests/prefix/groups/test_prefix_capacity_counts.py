"""What `kvell plan` says fits into a layout, checked against counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix.groups.capacity import (
    large_pages_needed,
    longest_request,
    request_bytes,
    requests_that_fit,
)
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import peak_pages
from kvell.prefix.groups.policies import policy_of
from tests.pages.pools import Chunk, kind_of

FULL = GroupSpec("full", GroupKind.FULL, (5,), 64, 16, 1024, 6, 0)
SLIDING = GroupSpec("sliding", GroupKind.SLIDING, (0, 1), 32, 16, 1024, 6, 40)


def request_pages(group: GroupSpec, tokens: int, chunk_tokens: int = 1) -> int:
    return peak_pages(group, Facts(tokens), tokens, chunk_tokens)


def layout(large_pages: int, *groups: GroupSpec) -> Layout:
    return Layout(groups or (FULL, SLIDING), 6 * 1024, large_pages)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (160, 10)])
def test_full_attention_holds_every_token(tokens: int, pages: int) -> None:
    assert request_pages(FULL, tokens) == pages


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (40, 3), (48, 3), (49, 4), (10_000, 4)])
def test_a_window_stops_growing(tokens: int, pages: int) -> None:
    assert request_pages(SLIDING, tokens) == pages


def pages_by_counting(group: GroupSpec, tokens: int, chunk_tokens: int) -> int:
    """Most pages touched at once when every alignment of chunks is tried."""
    most = 0
    for start in range(tokens):
        end = min(start + chunk_tokens, tokens)
        first = policy_of(group).kept_start(start)
        most = max(most, (end - 1) // group.page_tokens - first // group.page_tokens + 1)
    return most


@given(
    tokens=st.integers(1, 300),
    window=st.one_of(st.integers(1, 100), st.integers(1, 100).map(Chunk)),
    chunk_tokens=st.integers(1, 64),
    page_tokens=st.sampled_from([1, 8, 16]),
)
def test_pages_are_enough_and_at_most_one_too_many(
    tokens: int, window: int, chunk_tokens: int, page_tokens: int
) -> None:
    group = GroupSpec("s", kind_of(window), (0,), 32, page_tokens, 1024, 6, int(window))
    counted = pages_by_counting(group, tokens, chunk_tokens)
    assert counted <= request_pages(group, tokens, chunk_tokens) <= counted + 1


def test_request_bytes_add_up_over_groups_with_padding() -> None:
    assert request_bytes(layout(9), 49) == (4 + 4) * 1024


def test_groups_round_up_to_whole_large_pages() -> None:
    assert large_pages_needed(layout(9), 1) == 2
    assert large_pages_needed(layout(9), 49, requests=3) == 2 + 2


@pytest.mark.parametrize(("large_pages", "requests"), [(1, 0), (2, 1), (3, 1), (4, 3), (10, 7)])
def test_requests_that_fit(large_pages: int, requests: int) -> None:
    assert requests_that_fit(layout(large_pages), 49) == requests


@given(large_pages=st.integers(1, 50), tokens=st.integers(1, 2000))
def test_one_more_request_would_not_fit(large_pages: int, tokens: int) -> None:
    pool = layout(large_pages)
    count = requests_that_fit(pool, tokens)
    assert large_pages_needed(pool, tokens, count) <= large_pages
    assert large_pages_needed(pool, tokens, count + 1) > large_pages


@given(large_pages=st.integers(1, 50))
def test_one_more_token_would_not_fit(large_pages: int) -> None:
    pool = layout(large_pages)
    longest = longest_request(pool, 1_000_000)
    assert longest == 0 or large_pages_needed(pool, longest) <= large_pages
    assert large_pages_needed(pool, longest + 1) > large_pages


def test_longest_request_is_bounded_by_the_model() -> None:
    assert longest_request(layout(50), 100) == 100


def test_windows_let_far_more_in() -> None:
    """What groups of their own buy over one size for all layers."""
    sliding, full = layout(20, SLIDING), layout(20, FULL)
    assert requests_that_fit(sliding, 1000) > 10 * requests_that_fit(full, 1000)
