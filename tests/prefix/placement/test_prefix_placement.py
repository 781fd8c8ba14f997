"""Where pages are placed: association by demand, joint demand, the ladder (Jenga fig. 8)."""

from hypothesis import given
from hypothesis import strategies as st

from tests.depth import some
from tests.oracle.index.seen import empty_larges
from tests.pages.pools import group, pool_of
from tests.prefix.story import Story, ints


def larges(story: Story, handle: int, group_index: int = 0) -> set[int]:
    per_large = story.layout.groups[group_index].pages_per_large
    return {page // per_large for page in story.pages(handle, group_index).values()}


def test_jenga_fig_8_interleaved_growth_ends_in_large_pages_of_ones_own() -> None:
    """Four small pages in a large one; A and B grow in turn, and A ends."""
    story = Story(pool_of(4, group(1, 4)))
    a = story.open([1] * 8, expected=8)
    b = story.open([2] * 8, expected=8)
    for until in range(1, 9):
        story.grow(a, until)
        story.grow(b, until)
    assert len(larges(story, a)) == len(larges(story, b)) == 2
    assert not larges(story, a) & larges(story, b)
    story.close(a)
    assert empty_larges(story.check()) == 2


def test_small_requests_pack_into_shared_large_pages() -> None:
    """By demand: two requests of half a large page share one, where Jenga would take two."""
    story = Story(pool_of(4, group(1, 4)))
    first, second = story.open([1, 1], expected=2), story.open([2, 2], expected=2)
    story.grow(first, 2)
    story.grow(second, 2)
    assert larges(story, first) == larges(story, second)
    assert empty_larges(story.check()) == 3


def test_a_remainder_packs_where_it_fits_best() -> None:
    story = Story(pool_of(6, group(1, 4)))
    for size in (1, 2):
        filler = story.open([size] * size, expected=4 * size)
        story.grow(filler, size)
    long = story.open([9] * 6, expected=6)
    story.grow(long, 6)
    assert len(larges(story, long)) == 2, "one large page of its own, and a shared remainder"
    assert story.check().rungs["own_large_page"] >= 1


def test_a_group_leaves_the_large_page_that_another_needs() -> None:
    """One whole large page is left. The first group has a page in a used one and could take
    the whole one; the second needs it. Group by group the step would fail."""
    story = Story(pool_of(3, group(1, 2), group(1, 1, window=2)))
    first = story.open([1], expected=1)
    story.grow(first, 1)
    assert empty_larges(story.check()) == 1
    second = story.open([2], expected=8)
    story.grow(second, 1)
    assert larges(story, second) == larges(story, first)
    assert len(story.pages(second, 1)) == 1


def test_growth_is_all_or_nothing_and_serves_the_longest_run_from_the_front() -> None:
    story = Story(pool_of(4, group(1, 2), group(1, 2, window=3)))
    handles = [story.open([n] * 4, expected=4) for n in range(3)]
    before = story.check()
    served, rows = story.core.grow(ints(handles), ints([2, 2, 2]))
    assert served == 2
    assert {int(row[0]) for row in rows} == {0, 1}
    story.check()
    story.close(handles[0])
    story.close(handles[1])
    assert story.check().whole == before.whole
    assert not story.pages(handles[2], 0)


def test_a_refused_growth_changes_nothing() -> None:
    story = Story(pool_of(2, group(1, 2)))
    handle = story.open([1] * 9, expected=9)
    story.grow(handle, 3)
    before = story.check()
    served, rows = story.core.grow(ints([handle]), ints([5]))
    assert (served, rows.shape) == (0, (0, 4))
    assert story.check() == before
    assert story.core.largest(handle, 9) == 4


def test_cached_pages_are_evicted_last_and_counted() -> None:
    story = Story(pool_of(3, group(1, 2)))
    story.serve([1, 2])
    story.serve([3, 4])
    busy = story.open([5] * 4, expected=4)
    story.compute(busy, 2)
    assert story.check().evicted_pages == (0,)
    story.compute(busy, 4)
    state = story.check()
    assert state.evicted_pages == (2,)
    assert (state.rungs["evict_large"], state.rungs["evict_page"]) == (1, 0)
    assert story.peek([1, 2, 0]) == 0
    assert story.peek([3, 4, 0]) == 2


def test_a_page_beside_used_ones_is_evicted_when_no_whole_large_page_may_go() -> None:
    """Jenga §5.4, last step: one page of the own group."""
    story = Story(pool_of(1, group(1, 3)))
    story.serve([1, 2])
    holder = story.open([9] * 2, expected=2)
    story.compute(holder, 1)
    story.compute(holder, 2)
    assert story.check().rungs["evict_page"] == 1
    assert story.check().evicted_pages == (1,)
    assert story.peek([1, 2, 0]) == 1, "the longest prefix of one age went first"


def test_what_lies_beside_an_evicted_page_goes_along_only_if_it_is_no_younger() -> None:
    """Two large pages in use: in one the oldest page and the youngest, in the other one between."""
    story = Story(pool_of(2, group(1, 3)))
    story.serve([1])
    story.next_step()
    for token in (2, 9):
        handle = story.open([token])
        story.compute(handle, 1)
    story.compute(story.open([3, 3]), 2)
    story.serve([5])
    story.next_step()
    story.close(handle)
    assert story.check().whole == 0
    story.compute(story.open([4, 4]), 2)
    assert [story.peek([token, 0]) for token in (1, 5, 9)] == [0, 0, 1]


def leave_a_hole(story: Story, beside: int) -> None:
    """One runs on so many tokens; a brief one beside it ends, and its page stays cached."""
    story.compute(story.open([1] * beside), beside)
    brief = story.open([2], expected=1)
    story.compute(brief, 1)
    story.next_step()
    story.close(brief)


def test_where_large_pages_are_scarce_holes_are_filled_before_older_history_goes() -> None:
    """Twenty large pages, two without a used page: the older history stays, a hole goes."""
    story = Story(pool_of(20, group(1, 2)))
    story.serve([7] * 4)
    story.next_step()
    leave_a_hole(story, beside=33)
    state = story.check()
    assert (state.whole, empty_larges(state)) == (3, 1)
    story.next_step()
    story.compute(story.open([3, 3], expected=2), 2)
    assert story.check().whole == 2
    story.compute(story.open([4], expected=1), 1)
    assert story.check().rungs["evict_page"] == 1
    assert story.peek([7] * 5) == 4
    assert story.peek([2, 0]) == 0


def test_where_prompts_hit_a_young_hole_stays_and_older_history_goes() -> None:
    """As before, but the older history was hit often, and not for long."""
    story = Story(pool_of(20, group(1, 2)))
    for _ in range(30):
        story.serve([7] * 4)
    for _ in range(20):
        story.next_step()
    leave_a_hole(story, beside=33)
    story.next_step()
    story.compute(story.open([3, 3], expected=2), 2)
    assert story.check().whole == 2
    story.compute(story.open([4], expected=1), 1)
    assert story.peek([7] * 5) < 4
    assert story.peek([2, 0]) == 1


def test_while_there_is_room_the_oldest_goes_wherever_it_lies() -> None:
    """As before, but two of six large pages have no used page."""
    story = Story(pool_of(6, group(1, 2)))
    story.serve([7] * 4)
    story.next_step()
    leave_a_hole(story, beside=5)
    story.next_step()
    story.compute(story.open([3, 3], expected=2), 2)
    story.compute(story.open([4], expected=1), 1)
    assert story.peek([7] * 5) == 3, "the end of the oldest prefix went"
    assert story.peek([2, 0]) == 1


def test_pages_associated_with_others_serve_before_anything_is_evicted() -> None:
    story = Story(pool_of(2, group(1, 4)))
    owner = story.open([1] * 8, expected=8)
    story.grow(owner, 5)
    guest = story.open([2] * 2, expected=2)
    story.grow(guest, 2)
    assert larges(story, guest) <= larges(story, owner)
    assert story.check().rungs["others_page"] == 1


@some()
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_what_is_placed_is_what_was_asked_and_nobody_elses(
    wants: list[tuple[int, int]], num_large: int, per_large: tuple[int, int]
) -> None:
    story = Story(pool_of(num_large, group(2, per_large[0]), group(1, per_large[1], window=4)))
    handles = [
        story.open([i] * (size + extra), expected=size + extra)
        for i, (size, extra) in enumerate(wants)
    ]
    served, rows = story.core.grow(ints(handles), ints([size for size, _ in wants]))
    for index, (size, _) in enumerate(wants[:served]):
        mine = rows[rows[:, 0] == index]
        for g, spec in enumerate(story.layout.groups):
            positions = mine[mine[:, 1] == g][:, 2].tolist()
            assert positions == list(range(-(-size // spec.page_tokens)))
    taken = [(int(g), int(page)) for _, g, _, page in rows]
    assert len(set(taken)) == len(taken)
    story.check()
