"""Large pages lent to others: the core cannot have them, and gives up what it only caches."""

import numpy as np
import pytest

from kvell.prefix.interface import CACHED, EMPTY, RANK_SHIFT, USED, WITHHELD
from tests.oracle.index.seen import empty_larges
from tests.pages.pools import confined, group, pool_of
from tests.prefix.story import Story, ints


def test_a_withheld_large_page_is_passed_over_until_it_is_restored() -> None:
    story = Story(pool_of(3, group(1, 2)))
    story.core.withhold(ints([0, 2]))
    state = story.check()
    assert (state.whole, empty_larges(state), state.withheld) == (1, 1, (0, 2))
    assert story.core.totals().empty_large == 1
    handle = story.open([1] * 6, expected=6)
    assert story.core.largest(handle, 6) == 2
    assert {page // 2 for _, _, _, page in story.grow(handle, 2)} == {1}
    story.core.restore(ints([2]))
    assert {page // 2 for _, _, _, page in story.grow(handle, 4)} == {2}
    story.core.restore(ints([0]))
    assert {page // 2 for _, _, _, page in story.grow(handle, 6)} == {0}
    assert story.check().withheld == ()


def test_what_it_cached_is_evicted_and_can_no_longer_be_hit() -> None:
    story = Story(pool_of(4, group(1, 2)))
    story.serve([1] * 4)
    story.serve([2] * 4)
    assert story.peek([1] * 4 + [0]) == story.peek([2] * 4 + [0]) == 4
    order = story.core.reclaim_order()
    first = np.argsort(order, kind="stable")[:2].astype(np.int32)
    story.core.withhold(first)
    assert story.peek([1] * 4 + [0]) == 0, "the older goes first"
    assert story.peek([2] * 4 + [0]) == 4
    assert story.check().evicted_pages == (4,)


def test_the_order_tells_withheld_empty_cached_by_age_and_used_apart() -> None:
    story = Story(pool_of(5, group(1, 2)))
    story.serve([1] * 2)
    story.serve([2] * 2)
    running = story.open([3] * 2, expected=2)
    story.compute(running, 2)
    story.core.withhold(ints([4]))
    order = story.core.reclaim_order()
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == [
        WITHHELD,
        EMPTY,
        CACHED + (2 << RANK_SHIFT) + 1,
        CACHED + (2 << RANK_SHIFT) + 2,
        USED,
    ]
    assert order[4] == WITHHELD


def test_used_withheld_and_unknown_large_pages_are_refused() -> None:
    story = Story(pool_of(3, group(1, 2)))
    handle = story.open([1, 1], expected=2)
    story.compute(handle, 2)
    story.core.withhold(ints([2]))
    before = story.check()
    for larges, problem in [
        ([1, 0], "large page 0 is not available"),
        ([1, 2], "large page 2 is not available"),
        ([1, 1], "named twice"),
        ([3], "no such large page"),
        ([-1], "no such large page"),
    ]:
        with pytest.raises(ValueError, match=problem):
            story.core.withhold(ints(larges))
    with pytest.raises(ValueError, match="large page 1 is not withheld"):
        story.core.restore(ints([2, 1]))
    assert story.check() == before


def test_a_pool_cut_into_shares_has_none_to_give() -> None:
    story = Story(confined(pool_of(4, group(1, 2))))
    with pytest.raises(ValueError, match="cut into shares"):
        story.core.withhold(ints([0]))
