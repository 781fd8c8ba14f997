"""How large the large page is: the multiple, what costs a long request least, or the largest."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.grouping import ALIGNMENT_BYTES
from kvell.pages.large_page import (
    MAX_PADDING,
    OPEN_PART,
    choose_large_page_bytes,
    cost_bytes,
    padded_sizes,
)
from kvell.vocabulary import GIB, KIB, MIB

groups = st.lists(
    st.tuples(st.integers(1, 4000).map(lambda n: n * ALIGNMENT_BYTES), st.integers(1, 1 << 32)),
    min_size=1,
    max_size=4,
)


def test_padding_buys_a_small_large_page_where_the_multiple_explodes() -> None:
    pages = [64 * 1000, 64 * 1009]
    assert choose_large_page_bytes(pages, [MIB, MIB], 4 * GIB) == (64 * 1009, "padded")
    assert math.lcm(*pages) == 64 * 1000 * 1009


def test_what_a_request_holds_most_of_is_padded_least() -> None:
    """104 KiB pad pages of 100 by 4 %: cheap if a request holds few of them."""
    pages = [100 * KIB + 64, 104 * KIB]
    few, many = MIB, 4 * GIB
    size, rule = choose_large_page_bytes(pages, [few, many], 64 * GIB)
    assert (size, rule) == (104 * KIB, "padded")
    size, rule = choose_large_page_bytes(pages, [many, few], 64 * GIB)
    assert rule == "padded"
    assert size > 104 * KIB
    assert size / (size // pages[0] * pages[0]) - 1 < 0.001


def test_padding_and_open_large_pages_add_up() -> None:
    """384 bytes are three pages of 128, or one of 256 and half as much again."""
    assert cost_bytes(384, [128, 256], [5 * MIB, 2 * MIB]) == MIB + OPEN_PART * 384 * 2


def test_a_small_pool_takes_the_largest_page_rather_than_a_large_multiple() -> None:
    size, rule = choose_large_page_bytes([64 * 97, 64 * 101], [KIB, KIB], 64 * KIB)
    assert rule == "largest-page"
    assert 64 * 101 <= size <= 2 * 64 * 101


@given(groups, st.integers(1 * MIB, 64 * GIB))
def test_large_pages_keep_to_the_cap_and_padding_to_its_limit(
    sizes: list[tuple[int, int]], pool: int
) -> None:
    pages, held = [page for page, _ in sizes], [bytes_ for _, bytes_ in sizes]
    size, rule = choose_large_page_bytes(pages, held, pool)
    cap = min(pool // 64, max(64 * MIB, pool // 256))
    assert size >= max(pages)
    assert size <= cap or max(pages) == math.lcm(*pages) or rule == "largest-page"
    assert rule != "largest-page" or math.lcm(*pages) > cap
    if rule == "padded":
        assert all(size / (size // p * p) - 1 <= MAX_PADDING for p in pages)
    if rule == "lcm":
        assert size == math.lcm(*pages)


@given(groups, st.integers(1 * MIB, 256 * MIB))
def test_no_size_costs_a_long_request_less(sizes: list[tuple[int, int]], pool: int) -> None:
    pages, held = [page for page, _ in sizes], [bytes_ for _, bytes_ in sizes]
    size, rule = choose_large_page_bytes(pages, held, pool)
    if rule == "padded":
        costs = [
            cost_bytes(one, pages, held) for one in padded_sizes(pages, pool // 64, MAX_PADDING)
        ]
        assert cost_bytes(size, pages, held) == min(costs)
