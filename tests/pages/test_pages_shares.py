"""Equal shares: the same number of pages for every group, and not one more would go in."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.sizing import equal_shares, larges_for, proportional_shares

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


def test_proportions_by_hand() -> None:
    """Of 12, one each; ten more as 3 to 1: 7.5 and 2.5, the half goes to the first."""
    assert proportional_shares([3, 1], 12) == (9, 3)
    assert proportional_shares([5], 4) == (4,)


def test_a_share_is_never_nothing_unless_all_are() -> None:
    assert proportional_shares([10**9, 1], 3) == (2, 1)
    assert proportional_shares([10**9, 1], 1) == (0, 0)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.integers(5, 10**5))
def test_proportions_give_out_everything_and_round_by_less_than_one(
    weights: list[int], num_large: int
) -> None:
    shares = proportional_shares(weights, num_large)
    spare = num_large - len(weights)
    assert sum(shares) == num_large
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - 1 - spare * weight / sum(weights)) < 1
