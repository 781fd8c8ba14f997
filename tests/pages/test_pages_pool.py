"""The pool's two levels, one transition at a time."""

import pytest

from kvell.pages.snapshot import NO_GROUP, SHARED
from tests.oracle.pages.demand import Supply
from tests.oracle.pages.pool import PagePool
from tests.pages.pools import group, pool_of, recorded_pool

OLD, YOUNG = (1, 3, -4), (1, 7, -4)


def claim(pool: PagePool, group_index: int, holder: int = SHARED) -> int:
    large = pool.claim_large(group_index, holder)
    assert large is not None
    return large


def test_a_fresh_pool_belongs_to_no_group() -> None:
    pool, _ = recorded_pool(3, group(4, 2), group(4, 3))
    assert pool.group == [NO_GROUP] * 3
    assert pool.num_empty_large == 3
    assert pool.supply == Supply(3, (0, 0), (2, 3))


def test_claims_take_the_lowest_large_page_until_there_is_none() -> None:
    pool, _ = recorded_pool(2, group(4, 2))
    assert [pool.claim_large(0, SHARED) for _ in range(3)] == [0, 1, None]


def test_taking_goes_from_the_lowest_page_and_changes_the_supply() -> None:
    pool, _ = recorded_pool(2, group(4, 3), group(4, 2))
    claim(pool, 1)
    large = claim(pool, 0)
    assert pool.supply.whole == 2, "claimed, but nothing in it is used yet"
    assert [pool.take(large), pool.take(large)] == [3, 4]
    assert pool.supply == Supply(1, (1, 0), (3, 2))
    assert pool.num_empty(large) == 1


def test_the_last_release_of_unnamed_pages_gives_the_large_page_back_to_all_groups() -> None:
    pool, told = recorded_pool(1, group(4, 2), group(4, 2))
    large = claim(pool, 0, holder=5)
    first, second = pool.take(large), pool.take(large)
    pool.release(0, first, OLD)
    assert pool.group[large] == 0
    pool.release(0, second, OLD)
    assert (pool.group[large], pool.owner[large], pool.num_empty_large) == (NO_GROUP, SHARED, 1)
    assert claim(pool, 1) == large
    assert not told.pages
    assert not told.larges


def test_a_named_page_is_cached_when_its_last_user_leaves() -> None:
    pool, told = recorded_pool(1, group(4, 2))
    page = pool.take(claim(pool, 0))
    pool.index(0, page, (0, 0, -4))
    pool.acquire(0, page)
    pool.release(0, page, OLD)
    assert pool.is_used(0, page)
    assert not told.pages
    pool.release(0, page, YOUNG)
    assert not pool.is_used(0, page)
    assert (pool.used[0], pool.cached[0]) == (0, 1)
    assert told.pages == [(0, page, YOUNG)]
    assert told.larges == [0]
    assert pool.supply.whole == 1, "it can be evicted for any group"


def test_a_release_never_makes_a_page_older_and_none_keeps_its_place() -> None:
    pool, _ = recorded_pool(1, group(4, 2))
    page = pool.take(claim(pool, 0))
    pool.index(0, page, YOUNG)
    pool.release(0, page, OLD)
    assert pool.indexed[0][page] == YOUNG
    pool.acquire(0, page)
    pool.release(0, page, None)
    assert pool.indexed[0][page] == YOUNG


def test_a_cached_page_is_used_again_when_acquired() -> None:
    pool, _ = recorded_pool(1, group(4, 2))
    page = pool.take(claim(pool, 0))
    pool.index(0, page, OLD)
    pool.release(0, page, OLD)
    pool.acquire(0, page)
    assert (pool.used[0], pool.cached[0], pool.refs[0]) == (1, 0, {page: 1})
    assert pool.supply == Supply(0, (1,), (2,))


def test_evicting_the_last_cached_page_empties_the_large_page() -> None:
    pool, told = recorded_pool(1, group(4, 2))
    large = claim(pool, 0)
    pages = [pool.take(large), pool.take(large)]
    for page in pages:
        pool.index(0, page, OLD)
        pool.release(0, page, OLD)
    assert list(pool.cached_in(large)) == pages
    pool.evict(0, pages[0])
    assert told.larges == [large, large], "one page fewer: its time may have changed"
    assert list(pool.cached_in(large)) == [pages[1]]
    pool.evict(0, pages[1])
    assert pool.num_empty_large == 1


def test_a_holder_finds_its_own_large_pages_first_and_others_do_not() -> None:
    pool, _ = recorded_pool(3, group(4, 2))
    pool.open_holder(1)
    pool.open_holder(2)
    mine, theirs = claim(pool, 0, 1), claim(pool, 0, 2)
    pool.take(mine)
    pool.take(theirs)
    assert pool.own_large(0, 1, in_use=True) == mine
    assert pool.own_large(0, 3, in_use=True) is None
    assert pool.shared_large(0, 1, in_use=True) is None
    assert pool.others_large(0, in_use=True) == theirs, "that of the youngest holder"


def test_what_a_holder_leaves_behind_is_shared() -> None:
    pool, _ = recorded_pool(1, group(4, 3))
    pool.open_holder(1)
    large = claim(pool, 0, 1)
    pool.take(large)
    pool.close_holder(1)
    assert pool.owner[large] == SHARED
    assert pool.shared_large(0, 1, in_use=True) == large


def test_a_full_large_page_of_a_gone_holder_is_shared_when_a_page_of_it_empties() -> None:
    pool, _ = recorded_pool(1, group(4, 2))
    pool.open_holder(1)
    large = claim(pool, 0, 1)
    pages = [pool.take(large), pool.take(large)]
    pool.close_holder(1)
    assert pool.shared_large(0, 1, in_use=True) is None
    pool.release(0, pages[0], OLD)
    assert pool.shared_large(0, 1, in_use=True) == large


@pytest.mark.parametrize(("want", "expected"), [(1, 2), (2, 1), (3, 0), (9, 0)])
def test_shared_pages_pack_best_fit_and_else_into_the_emptiest(want: int, expected: int) -> None:
    pool, _ = recorded_pool(3, group(4, 4))
    for used in (1, 2, 3):
        large = claim(pool, 0)
        for _ in range(used):
            pool.take(large)
    assert pool.shared_large(0, want, in_use=True) == expected


def test_large_pages_without_a_used_page_can_be_left_out() -> None:
    pool, _ = recorded_pool(2, group(4, 2))
    large = claim(pool, 0)
    page = pool.take(large)
    pool.take(large)
    pool.index(0, page, OLD)
    pool.release(0, page, OLD)
    other = claim(pool, 0)
    assert pool.shared_large(0, 1, in_use=False) == other
    assert pool.shared_large(0, 1, in_use=True) is None, "the used one has no empty page"


def test_groups_that_come_later_share_the_large_pages() -> None:
    pool, _ = recorded_pool(2, group(4, 2))
    large = pool.claim_large(0, SHARED)
    assert large is not None
    pool.add_groups(pool_of(2, group(4, 2), group(4, 3)))
    late = pool.claim_large(1, SHARED)
    assert late is not None
    assert [pool.take(late) for _ in range(3)] == [3, 4, 5]
    assert pool.claim_large(1, SHARED) is None
    assert pool.supply.pages_per_large == (2, 3)


def test_a_renamed_page_keeps_its_place_in_the_eviction_order() -> None:
    pool, recorder = recorded_pool(1, group(4, 2))
    large = pool.claim_large(0, SHARED)
    assert large is not None
    old, new = pool.take(large), pool.take(large)
    assert not pool.rename(0, old, new), "nothing named it"
    pool.index(0, old, (2, 7, -4))
    assert pool.rename(0, old, new)
    pool.release(0, old, None)
    pool.release(0, new, None)
    assert recorder.pages == [(0, new, (2, 7, -4))]
    assert pool.num_empty(large) == 1
