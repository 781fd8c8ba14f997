"""Prompts that keep a budget of their tokens: how they are cut, cached, and laid out in pages."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvell.engine.requests.plan import TokenWork
from kvell.engine.running.batching import PageTables
from kvell.engine.setup.budget_limits import observing_tokens
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, LayerSpec
from kvell.models.config.budgets import OBSERVED_TOKENS
from tests.engine.running.batches import as_lists, plan, work
from tests.engine.traffic import Traffic, Works, limits
from tests.engine.works import work_of
from tests.pages.pools import dropping, group, pool_of

BUDGET = 12


def traffic_of(batched: int = 100, seats: int = 8, large_pages: int = 60) -> Traffic:
    """Traffic with pages of four tokens; five tokens observe."""
    layout = pool_of(large_pages, dropping(4, 1, BUDGET), group(4, 1))
    return Traffic(layout, replace(limits(batched=batched, seats=seats), observing_tokens=5))


def step(traffic: Traffic) -> Works:
    """Run a step in which every sampled token is 7; return what was computed."""
    made = traffic.plan()
    traffic.answer(made, *(7 for one in made.work if one.samples))
    return [(str(w.request_id), w.start, w.count) for w in made.work]


def text(first: int, length: int) -> list[int]:
    return [(first + i) % 49 for i in range(length)]


@pytest.mark.parametrize(
    ("batched", "chunks"),
    [
        (30, [30]),
        (26, [25, 5]),
        (25, [25, 5]),
        (24, [24, 6]),
        (9, [9, 9, 7, 5]),
        (5, [5, 5, 5, 5, 5, 5]),
    ],
)
def test_tokens_that_observe_are_computed_in_one_step(batched: int, chunks: list[int]) -> None:
    traffic = traffic_of(batched)
    traffic.submit("a", text(0, 30))
    assert [step(traffic)[0][2] for _ in chunks] == chunks
    assert step(traffic) == [("a", 30, 1)]


def test_prompts_within_the_budget_are_cut_anywhere() -> None:
    traffic = traffic_of(batched=10)
    traffic.submit("a", text(0, BUDGET))
    assert step(traffic) == [("a", 0, 10)]
    assert step(traffic) == [("a", 10, 2)]


def test_what_others_leave_of_a_step_may_be_too_little() -> None:
    """Three requests decode; three of six tokens are left, but five must observe at once."""
    traffic = traffic_of(batched=6, seats=4)
    for name in "abc":
        traffic.submit(name, text(ord(name), 2), max_tokens=4)
    step(traffic)
    traffic.submit("long", text(0, 13))
    assert step(traffic)[3:] == [("long", 0, 3)]
    assert step(traffic)[3:] == [("long", 3, 3)]
    assert step(traffic)[3:] == [("long", 6, 2)]
    assert step(traffic) == [("long", 8, 5)], "the others are done"


def test_a_prompt_that_drops_finds_no_prefix_and_evicts_none() -> None:
    traffic = traffic_of()
    traffic.submit("short", text(0, 12), max_tokens=4)
    while traffic.core.has_work:
        step(traffic)
    traffic.submit("long", [*text(0, 12), 1, 2, 3], max_tokens=2)
    assert step(traffic) == [("long", 0, 15)]
    step(traffic)
    traffic.submit("again", text(0, 12), max_tokens=2)
    assert step(traffic)[-1] == ("again", 11, 1), "cached as before"


def test_nobody_waits_for_a_prefix_that_will_not_be_cached() -> None:
    traffic = traffic_of(batched=16)
    traffic.submit("a", text(0, 30))
    step(traffic)
    traffic.submit("same", text(0, 30))
    traffic.submit("short", text(0, 10))
    assert [name for name, _, _ in step(traffic)] == ["a", "same"]
    while traffic.core.has_work:
        step(traffic)
    assert traffic.core.stats().rungs["wait_for_prefix"] == 0


@pytest.mark.parametrize("salt", ["\0dropping", "dropping", "\0"])
def test_no_salt_leads_to_those_who_drop(salt: str) -> None:
    traffic = traffic_of()
    traffic.submit("short", text(0, 12), max_tokens=4, salt=salt)
    while traffic.core.has_work:
        step(traffic)
    traffic.submit("long", [*text(0, 12), 1, 2, 3], max_tokens=2)
    assert step(traffic) == [("long", 0, 15)]


def test_preempted_it_is_cut_at_its_prompts_end_again() -> None:
    """Generated tokens are recomputed in a step of their own, after the prompt was dropped."""
    traffic = traffic_of(large_pages=24)
    traffic.submit("a", text(0, 20), max_tokens=20)
    traffic.submit("b", text(9, 20), max_tokens=20)
    preempted = set()
    works: list[tuple[str, int, int]] = []
    while traffic.core.has_work:
        works += step(traffic)
        preempted |= set(traffic.plans[-1].preempted)
    assert preempted
    resumed = [w for w in works if w[1] == 20 and w[2] > 1]
    assert resumed
    assert not [w for w in works if w[1] < 20 < w[1] + w[2]]


def dropped(start: int, count: int, prompt_tokens: int) -> TokenWork:
    return work_of("q5", 5, start, count, prompt_tokens=prompt_tokens)


def arrays_of(one: TokenWork) -> dict[str, list[int]]:
    made = PageTables((dropping(4, 2, BUDGET),))
    made.update(plan([(5, 0, position, 10 + position) for position in range(8)]))
    return as_lists(made.arrays(0, [one]))


def test_a_prompt_is_written_whole() -> None:
    found = arrays_of(dropped(24, 6, 30))
    assert found["context_lens"] == [30]
    assert found["page_ids"] == list(range(10, 18))
    assert found["write_page_ids"] == [16, 16, 16, 16, 17, 17]


def test_what_follows_goes_behind_the_kept_tokens() -> None:
    """Of 30 tokens 12 are kept: token 30 is row 12, the first of page 3."""
    found = arrays_of(dropped(30, 1, 30))
    assert found["context_lens"] == [13]
    assert found["page_ids"] == [10, 11, 12, 13]
    assert (found["write_page_ids"], found["write_offsets"]) == ([13], [0])
    later = arrays_of(dropped(33, 3, 30))
    assert later["context_lens"] == [18]
    assert (later["write_page_ids"], later["write_offsets"]) == ([13, 14, 14], [3, 0, 1])


def test_nothing_shifts_behind_a_prompt_within_the_budget() -> None:
    assert arrays_of(dropped(20, 1, BUDGET)) == arrays_of(work(5, 20, 1))


def model_of(*kinds: GroupKind, images: Any = None) -> Any:
    layers = [LayerSpec(i, kind, 1, 8, 2, 20) for i, kind in enumerate(kinds)]
    return SimpleNamespace(description=SimpleNamespace(layers=layers), images=images)


DROPS = (GroupKind.FULL, GroupKind.DROPPING)


def test_nothing_observes_where_nothing_is_dropped() -> None:
    options = EngineOptions(max_num_batched_tokens=1, manager="paged")
    assert observing_tokens(model_of(GroupKind.FULL, GroupKind.SLIDING), options) == 0


def test_as_many_observe_as_the_choice_takes() -> None:
    options = EngineOptions(max_num_batched_tokens=OBSERVED_TOKENS)
    assert observing_tokens(model_of(*DROPS), options) == OBSERVED_TOKENS


@pytest.mark.parametrize(
    ("options", "images", "field", "problem"),
    [
        (EngineOptions(manager="paged"), None, "--kv-budget", "keeps every token"),
        (EngineOptions(), object(), "--kv-budget", "not exact with images"),
        (
            EngineOptions(max_num_batched_tokens=7),
            None,
            "--max-num-batched-tokens",
            "below the 8 tokens",
        ),
    ],
)
def test_what_does_not_go_with_a_budget(
    options: EngineOptions, images: Any, field: str, problem: str
) -> None:
    with pytest.raises(ChangeSomething, match=problem) as caught:
        observing_tokens(model_of(*DROPS, images=images), options)
    assert caught.value.field == field
