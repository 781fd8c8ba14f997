"""Every invariant of the audit can fail: each is broken once, and reported."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvell.pages.audit import audit
from kvell.pages.layout import Layout
from kvell.pages.snapshot import HolderSnapshot, PoolSnapshot
from tests.pages.pools import group, pool_of, state
from tests.prefix.story import Story, ints

LAYOUT = pool_of(8, group(4, 3), group(4, 4, window=6))


def healthy() -> PoolSnapshot:
    """Two requests and a finished third: used, cached, shared, straddling and empty pages."""
    story = Story(LAYOUT)
    story.serve(range(100, 109))
    first = story.open([*range(10), 1, 2])
    story.compute(first, 12)
    second = story.open([*range(8), 5, 5, 5])
    story.compute(second, 10)
    story.grow(second, 11)
    return story.check()


HEALTHY = healthy()
Break = Callable[[PoolSnapshot], PoolSnapshot]


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def large_of(group_index: int, *, used: bool = True) -> int:
    """A large page of a group, in use or with cached pages alone."""
    return next(
        large
        for large, owner in enumerate(HEALTHY.group)
        if owner == group_index and bool(HEALTHY.used[large]) is used
    )


def free_large() -> int:
    return HEALTHY.group.index(-1)


def holder_with(state: PoolSnapshot, index: int, **changes: object) -> PoolSnapshot:
    holders = list(state.holders)
    holders[index] = replace(holders[index], **changes)  # type: ignore[arg-type]
    return replace(state, holders=tuple(holders))


def drop_held_page(state: PoolSnapshot) -> PoolSnapshot:
    (first, pages), *rest = state.holders[0].groups
    return holder_with(state, 0, groups=((first, pages[:-1]), *rest))


def one_reference_too_many(state: PoolSnapshot) -> PoolSnapshot:
    page = next(iter(state.refs[0]))
    return replace(state, refs=({**state.refs[0], page: state.refs[0][page] + 1}, *state.refs[1:]))


def unnamed_key(state: PoolSnapshot) -> PoolSnapshot:
    page = next(p for p in state.refs[0] if p not in state.keys[0])
    return replace(state, keys=({**state.keys[0], page: (1, 1, -4)}, *state.keys[1:]))


def key_outside_its_group(state: PoolSnapshot) -> PoolSnapshot:
    page = free_large() * LAYOUT.groups[0].pages_per_large
    return replace(state, keys=({**state.keys[0], page: (1, 1, -4)}, *state.keys[1:]))


def moved_entry(state: PoolSnapshot) -> PoolSnapshot:
    entry = replace(state.index[0], end=state.index[0].end + 28)
    return replace(state, index=(entry, *state.index[1:]))


def empty_page_marked_used_too(state: PoolSnapshot) -> PoolSnapshot:
    large = large_of(0)
    mask = state.empty_masks[large] ^ 1
    return replace(state, empty_masks=put(state.empty_masks, large, mask))


def reserved_page_named(state: PoolSnapshot) -> PoolSnapshot:
    """The last page of the second request is content nobody has computed."""
    held = state.holders[1]
    return holder_with(state, 1, computed=4 * (held.groups[0][0] + len(held.groups[0][1]) - 3))


BREAKS: list[tuple[str, Break, str]] = [
    ("a holder lost a page", drop_held_page, "0 holders, 1 references"),
    ("a reference is counted twice", one_reference_too_many, "references"),
    ("a holder vanished", lambda s: replace(s, holders=s.holders[1:]), "references"),
    (
        "a free large page counts a user",
        lambda s: replace(s, used=put(s.used, free_large(), 1)),
        "in no group, but not empty",
    ),
    (
        "a free large page has a mask",
        lambda s: replace(s, empty_masks=put(s.empty_masks, free_large(), 1)),
        "in no group, but not empty",
    ),
    (
        "a used page is not counted",
        lambda s: replace(s, used=put(s.used, large_of(0), s.used[large_of(0)] - 1)),
        "counts",
    ),
    (
        "a cached page is counted twice",
        lambda s: replace(s, cached=put(s.cached, large_of(1), s.cached[large_of(1)] + 1)),
        "counts",
    ),
    ("a page is empty and not", empty_page_marked_used_too, "a page has two states or none"),
    (
        "an empty large page is in a group",
        lambda s: replace(
            s,
            group=put(s.group, free_large(), 0),
            empty_masks=put(s.empty_masks, free_large(), 0b111),
        ),
        "all empty, yet in group 0",
    ),
    (
        "a large page belongs to a stranger",
        lambda s: replace(
            s, owner=tuple(99 if g >= 0 else o for g, o in zip(s.group, s.owner, strict=True))
        ),
        "of holder 99, which has ended",
    ),
    ("the supply promises more", lambda s: replace(s, whole=s.whole + 1), "the supply says"),
    (
        "a group's rest is wrong",
        lambda s: replace(s, partial=put(s.partial, 1, s.partial[1] + 1)),
        "pages available in used large pages",
    ),
    ("the pool names what the index does not", unnamed_key, "the index and the pool disagree"),
    ("the index forgot a page", lambda s: replace(s, index=s.index[1:]), "disagree"),
    (
        "the index names a page twice",
        lambda s: replace(s, index=(*s.index, s.index[0])),
        "disagree",
    ),
    ("a named page left its group", key_outside_its_group, "its large page is not of the group"),
    ("a page is in the wrong node", moved_entry, "filed in the wrong node"),
    (
        "tokens were computed nowhere",
        lambda s: holder_with(s, 0, computed=99),
        "tokens computed beyond its pages",
    ),
    ("a reserved page can be hit", reserved_page_named, "a reserved page of group 0 is named"),
]


def test_a_hit_inside_a_page_needs_that_page_only_once_it_is_copied() -> None:
    """9 tokens hit: two pages, and the source of a third; without the source the page is due."""
    story = Story(LAYOUT)
    story.serve(range(9))
    lease = story.core.open(ints([*range(9), 7]), "", 9)
    assert story.core.hit_tokens(lease) == 9
    resumed = story.check()
    held = replace(resumed.holders[0], others=())
    told = audit(LAYOUT, replace(resumed, holders=(held,)))
    assert any("tokens computed beyond its pages" in line for line in told)


def test_part_of_a_state_is_reported() -> None:
    layout = pool_of(6, group(4, 2), state(2, 2))
    story = Story(layout)
    story.compute(story.open(range(4)), 4)
    healthy = story.check()
    tokens, (first, pages) = healthy.holders[0].groups
    broken = replace(healthy.holders[0], groups=(tokens, (first, pages[:1])))
    told = audit(layout, replace(healthy, holders=(broken,)))
    assert "holder 1: part of a state in group 1" in told


def test_a_healthy_state_passes_and_has_something_of_everything() -> None:
    assert audit(LAYOUT, HEALTHY) == []
    assert any(HEALTHY.used)
    assert any(HEALTHY.cached)
    assert HEALTHY.group.count(-1) > 0
    assert any(mask for mask in HEALTHY.empty_masks)
    assert max(refs for per_group in HEALTHY.refs for refs in per_group.values()) > 1
    assert len(HEALTHY.holders) == 2


@pytest.mark.parametrize(
    ("broken", "expected"), [b[1:] for b in BREAKS], ids=[b[0] for b in BREAKS]
)
def test_what_is_broken_is_reported(broken: Break, expected: str) -> None:
    told = audit(LAYOUT, broken(HEALTHY))
    assert any(expected in line for line in told), told


def test_an_empty_pool_is_healthy() -> None:
    layout: Layout = pool_of(3, group(4, 2))
    assert audit(layout, Story(layout).check()) == []


def test_a_report_names_the_page_and_counts_both_sides() -> None:
    stranger = HolderSnapshot(77, 4, 4, False, ((0, (0,)), (1, ())))
    told = audit(LAYOUT, replace(HEALTHY, holders=(*HEALTHY.holders, stranger)))
    held = HEALTHY.refs[0].get(0, 0)
    assert told == [f"group 0 page 0: {held + 1} holders, {held} references"]
