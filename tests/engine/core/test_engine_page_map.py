"""What an engine says of its pages is what its memory core has."""

import numpy as np
import pytest

from kvell.engine.protocol.pages import MOST_OWNERS, LargePage, PageOwner, Pages
from kvell.memory import GroupKind, LayerSpec, plan_layout
from tests.engine.conftest import make_layout
from tests.engine.core.watched_core import WatchedCore

LAYOUT = make_layout((0, 16), 40, page_tokens=4)


def columns(pages: Pages) -> list[list[int]]:
    """Rows of (group, used, cached, age)."""
    kinds = [(pages.group, "<i2"), (pages.used, "<u4"), (pages.cached, "<u4"), (pages.age, "<u4")]
    told = np.stack([np.frombuffer(c, k).astype(np.int64) for c, k in kinds], axis=1)
    rows: list[list[int]] = told.tolist()
    return rows


def used_pages(pages: Pages) -> list[int]:
    return [large for large, (_, used, _, _) in enumerate(columns(pages)) if used]


def test_an_idle_engine_has_empty_pages_only() -> None:
    pages = WatchedCore.over(LAYOUT).page_map.pages(5)
    assert (pages.incarnation, pages.step, pages.misses) == (5, 0, ())
    assert columns(pages) == [[-1, 0, 0, 0]] * 40
    told = [(g.name, g.kind, g.pages_per_large, g.page_bytes) for g in pages.groups]
    groups = LAYOUT.groups
    assert told == [(g.name, str(g.kind), g.pages_per_large, g.page_stride_bytes) for g in groups]


def test_pages_become_used_then_cached_and_age_with_the_steps() -> None:
    core = WatchedCore.over(LAYOUT)
    core.submit("a", range(40), 6)
    core.step()
    rows = columns(core.page_map.pages(0))
    assert sum(used for _, used, _, _ in rows) == sum(core.memory.totals().used_pages)
    assert all(age == 0 for _, used, _, age in rows if used)
    core.run()
    rows = columns(core.page_map.pages(0))
    assert sum(used for _, used, _, _ in rows) == 0
    assert sum(cached for _, _, cached, _ in rows) == sum(core.memory.totals().cached_pages) > 0
    sizes = [group.page_stride_bytes for group in LAYOUT.groups]
    cached_bytes = sum(cached * sizes[group] for group, _, cached, _ in rows)
    assert core.core.counters.load_stats(core.core.step).cached_bytes == cached_bytes > 0
    youngest = min(age for _, _, cached, age in rows if cached)
    core.answer("b", range(500, 540), 4)
    later = columns(core.page_map.pages(0))
    kept = [
        age
        for (_, _, before, _), (_, used, _, age) in zip(rows, later, strict=True)
        if before and not used
    ]
    assert kept and max(kept) > youngest


def test_pages_lent_to_activations_have_a_group_of_their_own() -> None:
    core = WatchedCore.over(LAYOUT)
    core.memory.withhold(np.asarray([3, 5], np.int32))
    rows = columns(core.page_map.pages(0))
    assert [large for large, row in enumerate(rows) if row[0] == -2] == [3, 5]
    assert core.page_map.large_page(3).group == -2


def test_a_large_page_tells_who_uses_it_and_which_tokens_are_there() -> None:
    core = WatchedCore.over(LAYOUT)
    core.submit("a", range(40), 6)
    core.step()
    shown = {n: core.page_map.large_page(n) for n in used_pages(core.page_map.pages(0))}
    full = [page for page in shown.values() if page.group == 0]
    assert {owner.request_id for page in shown.values() for owner in page.owners} == {"a"}
    per_large = LAYOUT.groups[0].pages_per_large
    for page in full:
        assert page.used + page.cached + page.free == per_large
        (owner,) = page.owners
        assert owner.pages == page.used and page.other_used == 0
        assert 0 <= owner.first_token < owner.end_token <= 41
    ends = sorted(owner.end_token for page in full for owner in page.owners)
    assert ends[-1] in (40, 41), "the last tokens are somewhere"


def test_shared_pages_have_several_owners_and_at_most_so_many_are_named() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("first", range(40))
    for number in range(6):
        core.submit(f"r{number}", [*range(40), 100 + number], 20)
    core.step()
    core.step()
    shared = [core.page_map.large_page(n) for n in used_pages(core.page_map.pages(0))]
    most = max(shared, key=lambda page: len(page.owners) + page.more_owners)
    assert len(most.owners) == MOST_OWNERS and most.more_owners == 2
    names = [owner.request_id for owner in most.owners]
    assert names == sorted(names), "of as many pages each, by name"


def test_a_cached_large_page_tells_the_prefixes_that_end_in_it() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("a", range(40))
    rows = columns(core.page_map.pages(0))
    cached = [large for large, (group, _, kept, _) in enumerate(rows) if kept and group == 0]
    pages = [core.page_map.large_page(large) for large in cached]
    assert all(page.owners == () and page.used == 0 for page in pages)
    ends = {end for page in pages for end in page.cached_ends}
    assert ends and all(end % 4 == 0 or end >= 40 for end in ends)
    assert all(len(page.cached_ends) <= MOST_OWNERS for page in pages)


def test_pages_that_no_request_holds_are_counted_apart() -> None:
    core = WatchedCore.over(LAYOUT)
    core.answer("a", range(40))
    lease = core.memory.open(np.arange(40, dtype=np.int32), "", lease_until=1000)
    held = [core.page_map.large_page(n) for n in used_pages(core.page_map.pages(0))]
    assert held and all(page.owners == () and page.other_used == page.used for page in held)
    core.memory.close(lease)


def test_a_state_stands_for_all_tokens_before_it() -> None:
    layers = [
        LayerSpec(0, GroupKind.FULL, 1, 8, 2),
        LayerSpec(1, GroupKind.STATE, 0, 0, 2, state_bytes=128),
    ]
    large_bytes = plan_layout(layers, 1 << 20, page_tokens=4).large_page_bytes
    core = WatchedCore.over(plan_layout(layers, large_bytes * 40, page_tokens=4))
    core.submit("a", range(40), 6)
    core.step()
    pages = core.page_map.pages(0)
    state = [g.kind for g in pages.groups].index("state")
    shown = [core.page_map.large_page(n) for n in used_pages(pages)]
    owners = [owner for page in shown if page.group == state for owner in page.owners]
    assert owners == [PageOwner(owners[0].request_id, 1, 0, 40)]


@pytest.mark.parametrize("number", [-1, 40, 10**6])
def test_a_large_page_that_does_not_exist_is_empty(number: int) -> None:
    core = WatchedCore.over(LAYOUT)
    assert core.page_map.large_page(number) == LargePage(number, 0)


def test_looking_changes_no_plan() -> None:
    plain, watched = (WatchedCore.over(LAYOUT) for _ in range(2))
    for core in (plain, watched):
        for number in range(12):
            core.submit(f"r{number}", [*range(number % 3, 40 + number), number], 5)
    while plain.core.has_work:
        plain.step()
        watched.page_map.pages(0)
        for large in range(0, 40, 7):
            watched.page_map.large_page(large)
        watched.step()
    assert plain.plans == watched.plans
