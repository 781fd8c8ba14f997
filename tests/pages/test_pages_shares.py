"""Equal shares: the same number of pages for every group, and not one more would go in."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.shares import equal_shares, larges_for

counts = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def test_shares_counted_by_hand() -> None:
    """Ten large pages of 1 or 4: eight pages each take 8 + 2."""
    assert equal_shares([1, 4], 10) == (8, 2)
    assert equal_shares([3], 7) == (7,)


def test_a_pool_smaller_than_its_groups_has_no_shares() -> None:
    assert equal_shares([1, 4, 4], 2) == (0, 0, 0)


@given(counts, st.integers(0, 60))
def test_shares_hold_equally_many_pages_and_one_more_would_not_go_in(
    per_large: list[int], num_large: int
) -> None:
    shares = equal_shares(per_large, num_large)
    assert sum(shares) <= num_large
    pages = min(share * count for share, count in zip(shares, per_large, strict=True))
    assert larges_for(pages, per_large) == list(shares)
    assert sum(larges_for(pages + 1, per_large)) > num_large
