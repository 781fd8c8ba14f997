"""Equal parts: a newcomer finds its part, whatever others have taken before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.requests.turns import EqualParts, leaves_parts
from kvell.errors import TryLater
from tests.depth import many

MOST = 720

STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefghij"), st.booleans(), st.integers(1, MOST)), max_size=40
)


class Model:
    """A pool, and what each tenant holds of it."""

    def __init__(self) -> None:
        self.pool = EqualParts(MOST, "grammar", "things are kept")
        self.held: dict[str, int] = {}

    def take(self, tenant: str, count: int) -> bool:
        try:
            self.pool.take(tenant, count)
        except TryLater:
            return False
        self.held[tenant] = self.held.get(tenant, 0) + count
        return True

    def take_all(self, tenant: str, count: int) -> None:
        while count:
            count = count if self.take(tenant, count) else count // 2

    def give_back(self, tenant: str, count: int) -> None:
        count = min(count, self.held.get(tenant, 0))
        if count:
            self.pool.give_back(tenant, count)
            self.held[tenant] -= count
            if not self.held[tenant]:
                del self.held[tenant]


@many()
@given(STEPS)
def test_a_newcomer_finds_its_part_after_any_takes_of_others(
    steps: list[tuple[str, bool, int]],
) -> None:
    model = Model()
    for tenant, takes, count in steps:
        if takes:
            model.take_all(tenant, count)
        else:
            model.give_back(tenant, count)
        others = len(model.held)
        assert model.pool.total == sum(model.held.values()) < 2.5 * MOST
        assert all(each <= MOST for each in model.held.values())
        part = MOST // (2 * (others + 1) * (others + 2))
        assert model.take("newcomer", part)
        model.give_back("newcomer", part)


def test_a_count_above_the_bound_is_taken_from_an_empty_pool_and_leaves_parts() -> None:
    model = Model()
    assert model.take("a", 10 * MOST)
    assert not model.take("a", 1)
    assert model.take("b", MOST // 4)
    assert model.take("c", MOST // 12)
    assert not model.take("d", MOST)


def test_two_tenants_that_fill_a_pool_lock_no_other_out() -> None:
    model = Model()
    assert model.take("a", MOST) and not model.take("a", 1)
    assert model.take("b", MOST) and not model.take("b", 1)
    assert model.take("c", MOST // 4)
    assert model.take("d", MOST // 12)


def test_tenants_grow_to_equal_parts_and_one_alone_has_the_bound() -> None:
    model = Model()
    assert model.take("a", 1) and model.take("b", 1)
    model.take_all("a", MOST)
    assert model.held["a"] == MOST // 2
    model.give_back("b", MOST)
    model.take_all("a", MOST)
    assert model.held["a"] == MOST


@pytest.mark.parametrize("tenants", [2, 8, 40])
def test_many_tenants_that_each_take_all_they_can_leave_a_part(tenants: int) -> None:
    most = 1 << 24
    held: dict[str, int] = {}
    for number in range(tenants):
        count = 2 * most
        while not leaves_parts(held, str(number), count, most):
            count -= max(1, count // 64)
        held[str(number)] = count
    assert leaves_parts(held, "newcomer", 2 * most // ((tenants + 1) * (tenants + 2)), most)
