"""The baselines as configurations of the one allocator: literal order, and fixed shares."""

from dataclasses import replace

from kvell.pages.audit import audit
from tests.pages.pools import confined, group, literal, pool_of
from tests.prefix.story import Story, ints


def larges(story: Story, handle: int, group_index: int = 0) -> set[int]:
    per_large = story.layout.groups[group_index].pages_per_large
    return {page // per_large for page in story.pages(handle, group_index).values()}


# ------------------------------------------------------- the literal order (Jenga §5.4)


def test_everybody_gets_a_large_page_of_its_own() -> None:
    """Two requests of half a large page; by demand they would share one."""
    story = Story(literal(pool_of(4, group(1, 4))))
    first, second = story.open([1, 1], expected=2), story.open([2, 2], expected=2)
    story.grow(first, 2)
    story.grow(second, 2)
    assert not larges(story, first) & larges(story, second)
    assert story.check().rungs["own_large_page"] == 2


def test_the_five_steps_in_their_order() -> None:
    story = Story(literal(pool_of(3, group(1, 3))))
    story.serve([7, 7, 7])
    holder, other = story.open([1] * 6), story.open([2] * 2)
    story.grow(holder, 1)
    story.grow(holder, 2)
    assert _rungs(story) == {"own_page": 1, "own_large_page": 2}, "1: own page, 2: large page"
    story.grow(other, 1)
    story.grow(holder, 4)
    assert _rungs(story)["evict_large"] == 1, "3: the evictable large page"
    assert story.peek([7, 7, 7, 7]) == 0
    third = story.open([3] * 3)
    story.compute(third, 2)
    assert _rungs(story)["others_page"] == 1, "4: an empty page of the group"
    assert not larges(story, third) - larges(story, holder) - larges(story, other)
    story.next_step()
    story.close(third)
    story.grow(other, 2)
    story.grow(holder, 6)
    late = story.open([4] * 2)
    story.grow(late, 1)
    assert _rungs(story)["evict_page"] >= 1, "5: one page of the group"


def _rungs(story: Story) -> dict[str, int]:
    return {name: count for name, count in story.check().rungs.items() if count}


def test_an_evictable_large_page_goes_before_an_empty_page_of_the_group() -> None:
    """By demand the guest takes the empty page; to the letter, history is evicted for it."""
    hits = []
    for sharing in (lambda layout: layout, literal):
        story = Story(sharing(pool_of(2, group(1, 4))))
        story.serve([7, 7, 7, 7])
        story.grow(story.open([1], expected=1), 1)
        story.grow(story.open([2], expected=1), 1)
        hits.append(story.peek([7, 7, 7, 7, 7]))
    assert hits == [4, 0]


def test_a_feasible_step_is_placed_even_to_the_letter() -> None:
    """The first group leaves the large page that the second needs."""
    story = Story(literal(pool_of(3, group(1, 2), group(1, 1))))
    story.grow(story.open([1]), 1)
    second = story.open([2])
    story.grow(second, 1)
    assert len(story.pages(second, 0)) == len(story.pages(second, 1)) == 1


def test_a_group_uses_its_own_share_alone() -> None:
    """Ten large pages in equal shares: five each, however little the window needs."""
    story = Story(confined(pool_of(10, group(1, 2), group(1, 2, window=3))))
    handle = story.open([1] * 40)
    assert story.core.largest(handle, 40) == 10
    story.compute(handle, 10)
    assert story.core.grow(ints([handle]), ints([11]))[0] == 0
    free = Story(pool_of(10, group(1, 2), group(1, 2, window=3)))
    assert free.core.largest(free.open([1] * 40), 40) == 10
    free.compute(1, 10)
    assert free.core.largest(1, 40) > 12


def test_a_full_share_evicts_its_own_pages_only() -> None:
    story = Story(confined(pool_of(4, group(1, 2), group(2, 2))))
    story.serve([5, 5, 5, 5])
    before = story.check()
    assert [before.group.count(g) for g in range(2)] == [2, 1]
    story.next_step()
    story.compute(story.open([6] * 2), 2)
    state = story.check()
    assert state.evicted_pages[0] > 0
    assert state.evicted_pages[1] == 0


def test_the_audit_sees_a_group_beyond_its_share() -> None:
    layout = pool_of(4, group(1, 2))
    story = Story(layout)
    story.serve([1] * 5)
    wrong = audit(replace(layout, quota_large_pages=(2,)), story.check())
    assert wrong == ["group 0: holds 3 large pages, its share is 2"]
