"""Who goes first: by rank, age and length, pages and large pages (Jenga §5.1, §5.4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.snapshot import SHARED, Key
from tests.oracle.core.reference import ReferenceCore
from tests.oracle.eviction.evictor import NORMAL, SPARE, Evictor, LeastRecentlyUsed
from tests.oracle.pages.pool import PagePool
from tests.pages.pools import group, pool_of
from tests.prefix.story import ints

key = LeastRecentlyUsed().key


class Cache:
    """A pool with an evictor, and pages of given keys in it."""

    def __init__(self, num_large: int, per_large: int) -> None:
        self.evictor = Evictor(1)
        self.pool = PagePool(pool_of(num_large, group(4, per_large)), self.evictor)
        self.evictor.watch(self.pool)

    def add_large(self, keys: list[Key | None]) -> list[int]:
        """A large page with a page for each key; None is used, not cached."""
        large = self.pool.claim_large(0, SHARED)
        assert large is not None
        pages = [self.pool.take(large) for _ in keys]
        for page, page_key in zip(pages, keys, strict=True):
            if page_key is not None:
                self.pool.index(0, page, page_key)
                self.pool.release(0, page, page_key)
        return pages

    def eviction_order(self) -> list[int]:
        order = []
        while (found := self.evictor.oldest_page(0, in_used_large=False)) is not None:
            order.append(found[1])
            self.pool.evict(0, found[1])
        return order


def test_rank_then_age_then_the_longest_prefix() -> None:
    assert sorted([key(NORMAL, 3, 8), key(NORMAL, 3, 4), key(NORMAL, 2, 4), key(SPARE, 9, 4)]) == [
        key(SPARE, 9, 4),
        key(NORMAL, 2, 4),
        key(NORMAL, 3, 8),
        key(NORMAL, 3, 4),
    ]


class MostRecentlyUsed(LeastRecentlyUsed):
    """The newest first: a rule that no pool or placer knows of."""

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        return (rank, -time, -prefix_length)


def who_survives(core: ReferenceCore) -> list[int]:
    """Three prompts in room for two, and what each of them hits afterwards."""
    for step, token in enumerate((1, 2, 3)):
        core.begin_step(step)
        handle, length = core.open(ints([token] * 4), ""), ints([4])
        core.grow(ints([handle]), length)
        core.advance(ints([handle]), length)
        core.close(handle)
    return [core.peek(ints([token] * 5), "") for token in (1, 2, 3)]


def test_a_rule_can_be_replaced_without_touching_anything_else() -> None:
    layout = pool_of(2, group(4, 1))
    assert who_survives(ReferenceCore(layout)) == [0, 4, 4]
    assert who_survives(ReferenceCore(layout, MostRecentlyUsed())) == [4, 0, 4]


keys = st.builds(key, st.sampled_from([SPARE, NORMAL]), st.integers(0, 5), st.integers(1, 9))


@given(st.lists(keys, min_size=1, max_size=12))
def test_pages_go_in_the_order_of_their_keys(page_keys: list[Key]) -> None:
    cache = Cache(6, 2)
    of_page: dict[int, Key] = {}
    for i in range(0, len(page_keys), 2):
        pair = page_keys[i : i + 2]
        of_page.update(zip(cache.add_large(list(pair)), pair, strict=True))
    order = cache.eviction_order()
    assert [of_page[page] for page in order] == sorted(page_keys)
    assert cache.pool.num_empty_large == 6


@given(st.lists(st.lists(keys, min_size=1, max_size=3), min_size=1, max_size=6))
def test_a_large_page_is_as_young_as_its_youngest_page(larges: list[list[Key]]) -> None:
    cache = Cache(6, 3)
    for page_keys in larges:
        cache.add_large(list(page_keys))
    found = cache.evictor.oldest_large()
    assert found is not None
    youngest = [max(page_keys) for page_keys in larges]
    assert found[0] == min(youngest) == youngest[found[1]]


def test_a_page_in_use_again_is_passed_over_and_comes_back_younger() -> None:
    cache = Cache(2, 1)
    (first,), (second,) = cache.add_large([key(1, 1, 4)]), cache.add_large([key(1, 2, 4)])
    cache.pool.acquire(0, first)
    assert cache.evictor.oldest_page(0, in_used_large=False) == (key(1, 2, 4), second)
    assert cache.evictor.oldest_large() == (key(1, 2, 4), 1)
    cache.pool.release(0, first, key(1, 5, 4))
    assert cache.eviction_order() == [second, first]


def test_only_large_pages_in_use_when_no_whole_one_may_be_lost() -> None:
    cache = Cache(2, 2)
    idle, _ = cache.add_large([key(1, 1, 4), key(1, 1, 8)])
    beside_used, _ = cache.add_large([key(1, 9, 4), None])
    assert cache.evictor.oldest_page(0, in_used_large=True) == (key(1, 9, 4), beside_used)
    again = cache.evictor.oldest_page(0, in_used_large=False)
    assert again is not None
    assert again[1] != beside_used, "what was set aside is still there"
    assert idle in cache.eviction_order()


def test_a_large_page_with_a_user_is_not_evictable() -> None:
    cache = Cache(1, 2)
    cache.add_large([key(1, 1, 4), None])
    assert cache.evictor.oldest_large() is None


def test_evicting_the_youngest_page_makes_its_large_page_older() -> None:
    cache = Cache(2, 2)
    _, young = cache.add_large([key(1, 1, 4), key(1, 9, 4)])
    cache.add_large([key(1, 5, 4), key(1, 5, 8)])
    assert cache.evictor.oldest_large() == (key(1, 5, 4), 1)
    cache.pool.evict(0, young)
    assert cache.evictor.oldest_large() == (key(1, 1, 4), 0)


def test_a_page_reborn_under_the_same_id_is_not_confused_with_its_past() -> None:
    cache = Cache(1, 1)
    (page,) = cache.add_large([key(1, 1, 4)])
    cache.pool.evict(0, page)
    (again,) = cache.add_large([key(1, 7, 4)])
    assert again == page
    assert cache.evictor.oldest_page(0, in_used_large=False) == (key(1, 7, 4), page)


def test_nothing_cached_nothing_found() -> None:
    cache = Cache(1, 1)
    assert cache.evictor.oldest_page(0, in_used_large=False) is None
    assert cache.evictor.oldest_large() is None


def test_an_evictor_that_watches_nothing_says_so() -> None:
    evictor = Evictor(1)
    evictor.on_cached(0, 3, key(1, 1, 4))
    with pytest.raises(RuntimeError, match="watches no pool"):
        evictor.oldest_page(0, in_used_large=False)
