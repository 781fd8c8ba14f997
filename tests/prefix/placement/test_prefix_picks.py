"""Which large page a page is taken from, where there are very many to pick from."""

import numpy as np
import pytest

from tests.oracle.index.seen import empty_larges
from tests.pages.pools import group
from tests.prefix.core.lockstep import Pair, ints, pool_of

MANY = 4200
"""Large pages: more than 64 × 64, so that a set of them needs three levels of words."""
REQUESTS = 240


def request(both: Pair, pages: int, expected: int) -> int:
    """One that holds so many pages of one token each, none of it computed."""
    handle: int = both("open", np.arange(pages, dtype=np.int32), "")
    both("claim", handle, expected)
    assert both("grow", ints(handle), ints(pages))[0] == 1
    return handle


@pytest.mark.parametrize("per_large", [1, 3, 5])
@pytest.mark.parametrize("seed", range(2))
def test_holes_all_over_a_large_pool_are_filled_in_the_same_order(
    per_large: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    both = Pair(pool_of(MANY, group(1, per_large)))
    parts = [request(both, (MANY - 300) * per_large // 4, 1) for _ in range(4)]
    handles = []
    for index, pages in enumerate(draw.integers(1, 4 * per_large, REQUESTS).tolist()):
        handles.append(request(both, pages, int(draw.integers(1, 9))))
        if index % 60 == 30:  # thousands of large pages are to be had again
            both("close", parts.pop(int(draw.integers(len(parts)))))
        if draw.random() < 0.6:
            both("close", handles.pop(int(draw.integers(len(handles)))))
    both.check()
    for handle in [*handles, *parts]:
        both("close", handle)
    assert empty_larges(both.check()) == MANY


def test_of_thousands_of_large_pages_the_lowest_that_is_not_withheld_is_taken() -> None:
    both = Pair(pool_of(MANY, group(1, 2)))
    both("close", request(both, 2 * MANY, 2 * MANY))
    lent = np.concatenate([np.arange(70), np.arange(80, 4100)]).astype(np.int32)
    both("withhold", lent)
    handle = request(both, 1, 40)
    assert both.check().used[70] == 1
    both("restore", ints(4099, 64, 3))
    both("grow", ints(handle), ints(23))
    state = both.check()
    assert [large for large, used in enumerate(state.used) if used] == [3, 64, *range(70, 80)]
