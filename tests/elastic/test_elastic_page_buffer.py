"""The CPU buffer's ledger: all or nothing, a page has one holder, and a step lies in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.elastic.page_buffer import PageBuffer
from kvell.pages.layout import GroupSpec
from kvell.vocabulary import PageId
from tests.depth import some
from tests.elastic.buffer_audit import audit_pages
from tests.pages.pools import group

GROUPS: list[GroupSpec] = [group(4, 3), group(4, 5, 9)]


def test_who_asks_gets_all_or_nothing() -> None:
    buffer = PageBuffer(GROUPS, 3)
    assert buffer.hold(1, [4, 1]) == [[0, 1, 2, 3], [10]]
    assert buffer.hold(2, [3, 0]) is None, "two pages are left of its group, and no large page"
    assert buffer.counts.refused == 1
    assert buffer.hold(2, [2, 4]) == [[4, 5], [11, 12, 13, 14]]
    assert audit_pages(buffer) == []
    assert buffer.figures()["held_pages"] == 11


def test_what_is_released_is_to_be_had_a_step_later() -> None:
    buffer = PageBuffer(GROUPS, 1)
    buffer.hold(1, [3, 0])
    buffer.release(1)
    buffer.release(1)
    assert buffer.hold(2, [0, 1]) is None
    buffer.settle()
    assert buffer.hold(2, [0, 1]) == [[], [0]], "and for another group"


def test_what_nobody_reads_is_to_be_had_at_once() -> None:
    buffer = PageBuffer(GROUPS, 1)
    buffer.hold(1, [3, 0])
    buffer.drop(1)
    buffer.drop(1)
    assert buffer.hold(2, [0, 1]) == [[], [0]]
    assert audit_pages(buffer) == []


def test_pages_of_begun_large_pages_go_first() -> None:
    buffer = PageBuffer(GROUPS, 4)
    buffer.hold(1, [1, 0])
    buffer.hold(2, [2, 0])
    assert buffer.used_large == 1


def test_a_holder_asks_once() -> None:
    buffer = PageBuffer(GROUPS, 4)
    buffer.hold(1, [1, 0])
    with pytest.raises(ValueError, match="holder 1 has pages"):
        buffer.hold(1, [1, 0])


def test_sizes_are_strides() -> None:
    buffer = PageBuffer(GROUPS, 4)
    strides = [spec.page_stride_bytes for spec in GROUPS]
    assert buffer.size_bytes([2, 3]) == 2 * strides[0] + 3 * strides[1]


@some()
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from("hhrs"), st.integers(0, 9), st.integers(0, 7)), max_size=40),
)
def test_no_page_is_lost_or_given_twice(num_large: int, script: list[tuple[str, int, int]]) -> None:
    buffer = PageBuffer(GROUPS, num_large)
    held: dict[int, list[list[PageId]]] = {}
    for number, (what, one, other) in enumerate(script):
        if what == "h":
            pages = buffer.hold(number, [one, other])
            if pages is not None:
                assert [len(some) for some in pages] == [one, other]
                held[number] = pages
        elif what == "r" and held:
            holder = sorted(held)[one % len(held)]
            buffer.release(holder)
            del held[holder]
        else:
            buffer.settle()
        assert audit_pages(buffer) == []
        for index in range(2):
            taken = [page for pages in held.values() for page in pages[index]]
            assert len(set(taken)) == len(taken)
    for holder in held:
        buffer.release(holder)
    buffer.settle()
    assert buffer.used_large == 0
