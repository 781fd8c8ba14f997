"""While no large page is to spare, what lies in sparse ones moves to where pages are denser."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupSpec, Layout
from kvell.pages.snapshot import PoolSnapshot
from tests.depth import some
from tests.oracle.placement.compaction import MOST_REST, SQUEEZED_PAGES
from tests.pages.pools import confined, group, literal, pool_of, state
from tests.prefix.core.lockstep import Pair, decoded, filled, ints

PER_LARGE = 8
PAGE_TOKENS = 64
MOST_LARGE = 4


def prompt_of(index: int) -> list[int]:
    return [1000 + index, *range(PAGE_TOKENS)]


class Crowd:
    """Requests of two pages each in one pool, with nothing in common, one beside the other."""

    def __init__(self, layout: Layout, requests: int) -> None:
        self.both = Pair(layout)
        self.both("begin_step", 1)
        prompts = map(prompt_of, range(requests))
        self.running = {filled(self.both, prompt): len(prompt) for prompt in prompts}
        self.admitted = list(self.running)
        self.both("copies")
        self.step = 1

    def end(self, *places: int) -> None:
        """Of every four requests, which share a large page, those at these places."""
        for index, handle in enumerate(self.admitted):
            if index % 4 in places:
                self.both("close", handle)
                del self.running[handle]

    def squeezed(self, steps: int) -> list[int]:
        """Pages moved in each of so many steps, in which everybody decodes, without a new page."""
        moved = []
        for _ in range(steps):
            self.step += 1
            self.both("begin_step", self.step)
            moved.append(len(self.both("compact", MOST_LARGE)))
            self.both("copies")
            assert len(decoded(self.both, list(self.running), self.running, 7)) == len(self.running)
        return moved


def unused_large(state: PoolSnapshot) -> int:
    return sum(1 for used in state.used if not used)


def test_pages_leave_sparse_large_pages_until_some_are_to_spare() -> None:
    crowd = Crowd(pool_of(12, group(PAGE_TOKENS, PER_LARGE)), 48)
    crowd.end(1, 2, 3)
    assert unused_large(crowd.both.check()) == 0
    moved = crowd.squeezed(3)
    assert moved[0] > 0
    state = crowd.both.check()
    assert unused_large(state) >= 4, "to spare: no more is done then"
    assert sorted(state.refs[0].values()) == [1] * 24


def test_what_was_moved_is_hit_where_it_lies_now() -> None:
    crowd = Crowd(pool_of(12, group(PAGE_TOKENS, PER_LARGE)), 48)
    crowd.end(1, 2, 3)
    crowd.squeezed(3)
    for index in range(0, 48, 4):
        assert crowd.both("peek", ints(*prompt_of(index), 5), "") == PAGE_TOKENS


def test_pages_of_several_requests_stay() -> None:
    crowd = Crowd(pool_of(4, group(PAGE_TOKENS, PER_LARGE)), 16)
    for index in range(0, 16, 4):
        twin = crowd.both("open", ints(*prompt_of(index), 5), "")
        assert crowd.both("hit_tokens", twin) == PAGE_TOKENS
    crowd.end(1, 2, 3)
    shared = {page for page, users in crowd.both.check().refs[0].items() if users == 2}
    assert len(shared) == 4
    assert sum(crowd.squeezed(3)) > 0, "pages that one request has do move"
    after = crowd.both.check().refs[0]
    assert shared == {page for page, users in after.items() if users == 2}


def test_a_look_that_finds_nothing_is_not_repeated_at_once_but_some_time() -> None:
    crowd = Crowd(pool_of(12, group(PAGE_TOKENS, PER_LARGE)), 48)
    crowd.end(1)
    assert crowd.squeezed(20) == [0] * 20, "no large page is sparse"
    crowd.end(2, 3)
    moved = crowd.squeezed(MOST_REST + 1)
    assert moved[0] == 0
    assert sum(moved) > 0
    assert unused_large(crowd.both.check()) > 0


def test_no_more_than_so_many_in_one_step() -> None:
    crowd = Crowd(pool_of(120, group(PAGE_TOKENS, PER_LARGE)), 480)
    crowd.end(1, 2, 3)
    moved = crowd.squeezed(4)
    assert moved[0] == max(moved) == SQUEEZED_PAGES


@pytest.mark.parametrize("kind", [literal, confined])
def test_only_where_pages_are_given_by_demand(kind: Callable[[Layout], Layout]) -> None:
    crowd = Crowd(kind(pool_of(12, group(PAGE_TOKENS, PER_LARGE))), 12)
    crowd.end(1, 3)
    assert crowd.squeezed(3) == [0] * 3


def test_small_pages_take_holes_before_an_empty_large_page_is_begun() -> None:
    """Where large pages are scarce: one in eight has no used page, and a hole is to be had."""
    crowd = Crowd(pool_of(16, group(PAGE_TOKENS, PER_LARGE)), 60)
    assert unused_large(crowd.both.check()) == 1
    for handle in list(crowd.running)[1:30:2]:
        crowd.both("close", handle)
    crowd.both("begin_step", 2)
    filled(crowd.both, prompt_of(99))
    assert unused_large(crowd.both.check()) == 1


@some()
@given(
    st.sampled_from([[group(1, 6)], [group(1, 8), state(2, 4)], [group(2, 4), group(1, 6, 5)]]),
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans()), max_size=40),
)
def test_nobody_loses_anything(
    groups: list[GroupSpec], large: int, acts: list[tuple[int, int, bool]]
) -> None:
    """Any coming and going in a small pool: both cores agree, the audit holds, hits stay."""
    both = Pair(pool_of(large, *groups))
    running: dict[int, list[int]] = {}
    for step, (which, tokens, ends) in enumerate(acts):
        both("begin_step", step)
        if ends and running:
            gone = sorted(running)[which % len(running)]
            both("close", gone)
            del running[gone]
        prompt = [100 + which, *range(tokens)]
        handle = both("open", ints(*prompt), "")
        hit = both("hit_tokens", handle)
        both("claim", handle, len(prompt))
        served, _ = both("grow", ints(handle), ints(len(prompt)))
        if served:
            both("advance", ints(handle), ints(len(prompt)))
            running[handle] = prompt
            assert hit < len(prompt)
        else:
            both("close", handle)
        moved = both("compact", MOST_LARGE)
        both("copies")
        assert all(int(owner) in running for owner in moved[:, 0])
        both.check()
