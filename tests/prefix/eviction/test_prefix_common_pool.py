"""Which prefixes are protected, and what goes when there are too many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupKind, LayerSpec
from kvell.pages.sizing import plan_layout
from kvell.prefix.eviction.common_pool import (
    HISTORY_REQUESTS,
    MOST_PREFIXES,
    CommonPool,
    PoolCost,
    PoolPlan,
    pool_cost,
)
from kvell.prefix.eviction.shadow import Chain, PastRequest
from kvell.prefix.groups.capacity import request_bytes
from tests.depth import many

CHUNK = 4


def pool_of(share: float, pool_bytes: int = 1000, holder_bytes: int = 0) -> CommonPool:
    pool = CommonPool(PoolCost(pool_bytes, 10, holder_bytes), CHUNK)
    pool.share = share
    return pool


def note(pool: CommonPool, chain: Chain, times: int = 1) -> Chain:
    """Requests with this prompt come; the pool keeps its size."""
    shared: Chain = ()
    share = pool.share
    for _ in range(times):
        shared = come(pool, chain)
    pool.share = share
    return shared


def come(pool: CommonPool, chain: Chain) -> Chain:
    return pool.note(PastRequest(chain, CHUNK * len(chain), 0), 4)


def protect(pool: CommonPool, chain: Chain, uses: int = 2) -> PoolPlan:
    """Use a prefix so often that it is shared, and say that it is computed."""
    assert note(pool, chain, uses) == chain
    return pool.plan([chain])


def test_a_prefix_is_shared_from_the_second_request_on() -> None:
    pool = pool_of(1.0)
    assert note(pool, (1, 2, 3)) == ()
    assert note(pool, (1, 2, 9)) == (1, 2)
    assert note(pool, (5, 2, 9)) == ()


def test_what_is_shared_and_computed_is_protected_once() -> None:
    pool = pool_of(1.0)
    assert protect(pool, (1, 2)) == PoolPlan(opens=((1, 2),))
    assert pool.plan([(1, 2)]) == PoolPlan()
    assert (pool.protected, pool.protected_tokens, pool.protected_bytes) == (((1, 2),), 8, 20)


def test_nothing_is_protected_beyond_the_limit() -> None:
    pool = pool_of(0.03)
    assert protect(pool, (1, 2, 3, 4)) == PoolPlan(), "it alone is larger"
    assert protect(pool, (5, 6)) == PoolPlan(opens=((5, 6),))
    pool.share = 0.0
    assert pool.plan() == PoolPlan(closes=((5, 6),))


def test_the_least_used_goes_first_whoever_came_last() -> None:
    pool = pool_of(0.04)
    protect(pool, (1, 2), uses=5)
    protect(pool, (3, 4), uses=2)
    assert pool.least() == (3, 4)
    assert protect(pool, (5, 6), uses=3) == PoolPlan(closes=((3, 4),), opens=((5, 6),))
    assert protect(pool, (7, 8), uses=2) == PoolPlan(), "worth less than what is there"


def test_old_uses_fade() -> None:
    pool = pool_of(0.02)
    protect(pool, (1, 2), uses=4)
    for index in range(200):
        note(pool, (100 + index,))
    assert protect(pool, (5, 6), uses=2) == PoolPlan(closes=((1, 2),), opens=((5, 6),))


def test_per_byte_short_prefixes_are_worth_less_where_windows_cost() -> None:
    pool = pool_of(0.5, holder_bytes=100)
    protect(pool, (1,), uses=2)
    protect(pool, tuple(range(10, 20)), uses=2)
    assert pool.least() == (1,)


def test_a_conversation_is_protected_at_its_end_only() -> None:
    pool = pool_of(1.0)
    note(pool, (1, 2))
    assert note(pool, (1, 2, 3, 4)) == (1, 2)
    pool.plan([(1, 2)])
    assert note(pool, (1, 2, 3, 4, 5, 6)) == (1, 2, 3, 4)
    assert pool.plan([(1, 2, 3, 4)]) == PoolPlan(((1, 2),), ((1, 2, 3, 4),))


def test_a_beginning_that_others_share_stays_beside_its_continuation() -> None:
    pool = pool_of(1.0)
    protect(pool, (1, 2), uses=6)
    note(pool, (1, 2, 3))
    assert protect(pool, (1, 2, 3), uses=1) == PoolPlan(opens=((1, 2, 3),))
    assert pool.protected_bytes == 30, "shared chunks count once"


def test_the_history_is_bounded_and_forgets_the_oldest() -> None:
    pool = pool_of(1.0)
    note(pool, (1, 2))
    for index in range(HISTORY_REQUESTS):
        note(pool, (10 + index,))
    assert note(pool, (1, 2)) == ()


def test_the_size_follows_the_history() -> None:
    """A prefix of 2 chunks comes again after 6 others, in memory for 6."""
    pool = pool_of(0.0, pool_bytes=60)
    for index in range(64):
        come(pool, (1, 2))
        come(pool, tuple(range(100 + 6 * index, 106 + 6 * index)))
    assert pool.share == 0.375
    for index in range(HISTORY_REQUESTS):
        come(pool, (10_000 + index,))
    assert pool.share == 0.0, "nothing is shared any more"


def test_what_holds_no_tokens_protects_none() -> None:
    pool = CommonPool(PoolCost(1000, 0, 100), CHUNK)
    for _ in range(200):
        come(pool, (1, 2))
    assert pool.share == 0.0


def test_costs_are_what_a_request_takes() -> None:
    layers = [LayerSpec(0, GroupKind.FULL, 1, 8, 2), LayerSpec(1, GroupKind.SLIDING, 1, 8, 2, 64)]
    layout = plan_layout(layers, 1 << 24)
    cost = pool_cost(layout, 512)
    for chunks in (1, 10, 1000):
        need = request_bytes(layout, chunks * 512)
        assert abs(cost.bytes_of(chunks) - need) <= 2 * layout.large_page_bytes
    assert cost.holder_bytes > 0
    only_windows = plan_layout(layers[1:], 1 << 24)
    assert pool_cost(only_windows, 512).chunk_bytes == 0


def test_nothing_is_least_of_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        pool_of(1.0).least()


steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
        st.sampled_from([0.0, 0.02, 0.05, 0.2, 1.0]),
        st.booleans(),
    ),
    max_size=60,
)


@many()
@given(steps, st.sampled_from([0, 7]))
def test_plans_add_up_and_keep_the_limit(
    story: list[tuple[list[int], float, bool]], holder_bytes: int
) -> None:
    pool, held = pool_of(0.0, holder_bytes=holder_bytes), set[Chain]()
    for branches, share, yields in story:
        chain = tuple(hash(tuple(branches[: i + 1])) for i in range(len(branches)))
        shared = note(pool, chain)
        pool.share = share
        plan = pool.plan([shared])
        assert set(plan.closes) <= held
        held -= set(plan.closes)
        assert not set(plan.opens) & held
        held |= set(plan.opens)
        if yields and held:
            held.remove(pool.least())
            pool.remove(pool.least())
        assert set(pool.protected) == held
        assert len(held) <= MOST_PREFIXES
        keys = {key for each in held for key in each}
        assert pool.protected_bytes == 10 * len(keys) + holder_bytes * len(held)
        assert pool.protected_bytes <= pool.limit_bytes
