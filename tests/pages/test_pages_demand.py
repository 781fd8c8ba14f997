"""The joint question, beside a search through every way to hand out large pages."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.demand import Supply, feasible, whole_needed

supplies = st.integers(1, 3).flatmap(
    lambda groups: st.builds(
        Supply,
        st.integers(0, 4),
        st.tuples(*[st.integers(0, 5)] * groups),
        st.tuples(*[st.integers(1, 4)] * groups),
    )
)


def some_way(need: list[int], supply: Supply) -> bool:
    """Try every assignment of every whole large page to a group."""
    groups = range(len(need))
    return any(
        all(
            supply.partial[g] + given_to.count(g) * supply.pages_per_large[g] >= need[g]
            for g in groups
        )
        for given_to in itertools.product(groups, repeat=supply.whole)
    )


@given(supplies, st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_feasible_exactly_when_some_assignment_serves_every_group(
    supply: Supply, needs: list[int]
) -> None:
    need = needs[: len(supply.partial)]
    assert feasible(need, supply) == some_way(need, supply)


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
