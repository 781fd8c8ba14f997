"""The joint question, beside a search through every way to hand out large pages."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.oracle.pages.demand import Supply, feasible, may_take_whole, whole_needed


def supplies_of(num_groups: int) -> st.SearchStrategy[Supply]:
    """Free for all, or in shares that leave no large page over for a second group."""
    partial = st.tuples(*[st.integers(0, 5)] * num_groups)
    per_large = st.tuples(*[st.integers(1, 4)] * num_groups)
    shares = st.tuples(*[st.integers(0, 2)] * num_groups)
    return st.builds(Supply, st.integers(0, 4), partial, per_large) | st.builds(
        lambda share, have, per: Supply(sum(share), have, per, share), shares, partial, per_large
    )


supplies = st.integers(1, 3).flatmap(supplies_of)


def some_way(need: list[int], supply: Supply) -> bool:
    """Try every assignment of every whole large page to a group, no group above its share."""
    groups = range(len(need))
    shares = supply.shares or (supply.whole,) * len(need)
    return any(
        all(
            given_to.count(g) <= shares[g]
            and supply.partial[g] + given_to.count(g) * supply.pages_per_large[g] >= need[g]
            for g in groups
        )
        for given_to in itertools.product((-1, *groups), repeat=supply.whole)
    )


def after_a_whole_one(group: int, supply: Supply) -> Supply:
    """A whole large page has joined the group, all its pages to be had there."""
    groups = range(len(supply.partial))
    return Supply(
        supply.whole - 1,
        tuple(n + supply.pages_per_large[g] * (g == group) for g, n in enumerate(supply.partial)),
        supply.pages_per_large,
        supply.shares and tuple(supply.shares[g] - (g == group) for g in groups),
    )


@given(supplies, st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_feasible_exactly_when_some_assignment_serves_every_group(
    supply: Supply, needs: list[int]
) -> None:
    need = needs[: len(supply.partial)]
    assert feasible(need, supply) == some_way(need, supply)


@given(supplies, st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(0, 2))
def test_a_whole_large_page_may_be_taken_exactly_when_the_rest_stays_feasible(
    supply: Supply, needs: list[int], group: int
) -> None:
    need, group = needs[: len(supply.partial)], group % len(supply.partial)
    if not feasible(need, supply):
        return
    shares = supply.shares or (supply.whole,) * len(need)
    possible = (
        supply.whole > 0 and shares[group] > 0 and some_way(need, after_a_whole_one(group, supply))
    )
    assert may_take_whole(group, need, supply) == possible


def test_a_share_is_not_lent_to_another_group() -> None:
    supply = Supply(whole=3, partial=(0, 0), pages_per_large=(2, 2), shares=(1, 2))
    assert feasible([2, 4], supply)
    assert not feasible([3, 0], supply)


@given(supplies, st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_less_is_never_harder(supply: Supply, needs: list[int]) -> None:
    need = needs[: len(supply.partial)]
    less = [n // 2 for n in need]
    assert feasible(less, supply) or not feasible(need, supply)


def test_whole_large_pages_are_counted_after_what_partial_ones_give() -> None:
    assert whole_needed([7, 2, 0], Supply(9, (2, 2, 5), (4, 1, 1))) == [2, 0, 0]


def test_group_a_would_eat_what_group_b_needs_but_not_together() -> None:
    """One large page is whole; A has a page in a used one. A alone would take the whole one."""
    supply = Supply(whole=1, partial=(1, 0), pages_per_large=(2, 1))
    assert feasible([1, 1], supply)
    assert not feasible([2, 1], supply)


def test_a_partial_page_of_one_group_is_no_use_to_another() -> None:
    assert not feasible([0, 1], Supply(whole=0, partial=(5, 0), pages_per_large=(8, 8)))


def test_nothing_is_always_to_be_had() -> None:
    assert feasible([0, 0], Supply(whole=0, partial=(0, 0), pages_per_large=(3, 2)))
