"""What a step does and in which order, which requests are admitted and which preempted."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.planning.admission import MAX_HELD_BACK
from kvell.engine.protocol.messages import Finished
from kvell.engine.requests.plan import StepPlan, TokenWork
from kvell.vocabulary import RequestId
from tests.depth import machine, some
from tests.engine.conftest import make_layout, make_submit
from tests.engine.planning.machine import EngineMachine
from tests.engine.traffic import Traffic, limits, text, works
from tests.engine.works import with_spec
from tests.pages.pools import group, pool_of

LAST_ARRIVAL = 6
FULL = (0,)
MIXED = (0, 9)


def test_decodes_come_first_and_prefill_chunks_share_what_is_left_of_the_budget() -> None:
    traffic = Traffic(make_layout(MIXED, 40), limits(batched=8))
    traffic.submit("a", text(1, 4))
    assert traffic.step() == [("a", 0, 4)]
    traffic.submit("b", text(2, 10))
    traffic.submit("c", text(3, 10))
    assert traffic.step() == [("a", 4, 1), ("b", 0, 7)]
    assert traffic.step() == [("a", 5, 1), ("b", 7, 3), ("c", 0, 4)]
    assert traffic.step() == [("a", 6, 1), ("b", 10, 1), ("c", 4, 6)]


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    traffic = Traffic(make_layout(MIXED, 40), limits(batched=8))
    traffic.submit("a", text(1, 20))
    traffic.run()
    sampled = [[w.samples for w in p.work] for p in traffic.plans]
    assert sampled[:4] == [[False], [False], [True], [True]]
    assert [p.work[0].output_index for p in traffic.plans[2:5]] == [0, 1, 2]


def test_seats_are_kept() -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(seats=2))
    for n in range(4):
        traffic.submit(f"q{n}", text(n, 5), max_tokens=3)
    assert [name for name, _, _ in traffic.step()] == ["q0", "q1"]
    traffic.run()
    assert traffic.core.max_running == 2


def test_a_lower_priority_number_is_admitted_first_and_equal_ones_in_order() -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(seats=1))
    traffic.submit("first", text(0, 5), max_tokens=2)
    traffic.step()
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("urgent", -1)):
        prompt = text(len(traffic.prompts), 5)
        traffic.prompts[name] = prompt
        traffic.tell(with_spec(make_submit(name, prompt, 2), priority=priority))
    traffic.run()
    admitted = [name for plan in traffic.plans for name in plan.admitted]
    assert admitted == ["first", "urgent", "a", "c", "b"]


def test_tenants_and_what_they_asked_for_together_take_turns() -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(seats=1))
    traffic.submit("first", text(0, 5), max_tokens=2)
    traffic.step()
    for name, tenant, of_group in (
        *((f"a{n}", "red", "big") for n in range(4)),
        *(("b", "red", "small"), ("c0", "blue", "x"), ("c1", "blue", "x")),
    ):
        prompt = text(len(traffic.prompts), 5)
        traffic.prompts[name] = prompt
        traffic.tell(with_spec(make_submit(name, prompt, 2), tenant=tenant, group=of_group))
    traffic.run()
    admitted = [name for plan in traffic.plans for name in plan.admitted]
    assert admitted == ["first", "a0", "c0", "b", "c1", "a1", "a2", "a3"]


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    traffic = Traffic(make_layout(FULL, 8), limits())
    traffic.submit("long", text(1, 16), max_tokens=4)
    traffic.step()
    traffic.submit("too long for now", text(2, 20), max_tokens=2)
    traffic.submit("short", text(3, 3), max_tokens=2)
    assert [name for name, _, _ in traffic.step()] == ["long"]
    traffic.run()
    assert [r for p in traffic.plans for r in p.admitted] == ["long", "too long for now", "short"]


def grown_beside_a_prefill() -> Traffic:
    """Eleven pages of four tokens. ``b``'s 30 tokens fitted beside ``a`` when it was admitted;
    it computes three a step while ``a`` grows into its pages."""
    traffic = Traffic(make_layout(FULL, 11), limits(batched=4))
    traffic.submit("a", text(1, 4), max_tokens=16)
    traffic.submit("b", text(2, 30), max_tokens=4)
    return traffic


def test_a_chunk_shrinks_to_what_memory_allows_and_then_waits() -> None:
    traffic = grown_beside_a_prefill()
    traffic.run()
    assert traffic.rung("shrink_chunk") == 1
    assert traffic.rung("defer") >= 1
    chunks = [[w.count for w in p.work if w.request_id == "b"] for p in traffic.plans]
    deferred = next(i for i, counts in enumerate(chunks) if not counts and any(chunks[:i]))
    assert chunks[deferred - 1] < [3], "shrunk to the end of its last page"
    assert traffic.finished("a").preemptions == 0


def test_nobody_is_admitted_into_the_pages_a_running_prefill_still_needs() -> None:
    traffic = grown_beside_a_prefill()
    while "b" not in [r for p in traffic.plans for r in p.admitted]:
        traffic.step()
    traffic.submit("c", text(3, 2), max_tokens=1)
    traffic.run()
    steps = {str(name): p.step for p in traffic.plans for name in p.admitted}
    first_token = next(
        p.step for p in traffic.plans for w in p.work if w.request_id == "b" and w.samples
    )
    assert steps["c"] >= first_token


def test_the_youngest_is_preempted_waits_in_front_and_comes_back_with_a_hit() -> None:
    """Eight pages; both grow to six. What is left of the victim's prefix is found again."""
    traffic = Traffic(make_layout(FULL, 8), limits())
    traffic.submit("old", text(1, 8), max_tokens=16)
    traffic.submit("young", text(2, 9), max_tokens=15)
    traffic.submit("next", text(3, 30), max_tokens=2)
    traffic.run()
    (preempting,) = [p for p in traffic.plans if p.preempted]
    assert preempting.preempted == ("young",)
    assert not preempting.admitted, "none in a step that preempted"
    assert [w.request_id for w in preempting.work] == ["old"]
    (back,) = [p for p in traffic.plans if "young" in p.admitted and p.step > preempting.step]
    resumed = next(w for w in back.work if w.request_id == "young")
    assert resumed.start > 0
    assert resumed.output_index > 0, "its output so far is part of what is recomputed"
    assert "next" not in [r for p in traffic.plans if p.step < back.step for r in p.admitted]
    assert traffic.finished("young").preemptions == 1
    assert traffic.finished("young").cached_tokens == 0, "hits count at first admission"
    assert traffic.finished("old").preemptions == 0


def test_a_preempted_request_gets_no_pages_in_the_step_that_took_them() -> None:
    traffic = Traffic(make_layout(FULL, 8), limits())
    traffic.submit("old", text(1, 8), max_tokens=16)
    traffic.submit("young", text(2, 9), max_tokens=15)
    handles: dict[str, set[int]] = {}
    while traffic.core.has_work:
        plan = traffic.plan()
        for work in plan.work:
            handles.setdefault(work.request_id, set()).add(work.handle)
        for name in plan.preempted:
            assert not set(plan.new_pages[:, 0].tolist()) & handles[name]
            assert handles[name] & set(plan.released)
        traffic.finish_step(plan)
    assert len(handles["young"]) == 2, "handles are never reused"


def test_a_request_waits_for_a_prefix_that_another_is_computing_and_hits_it() -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(batched=8))
    shared = text(5, 20)
    traffic.submit("first", [*shared, 1])
    traffic.submit("second", [*shared, 2])
    traffic.submit("other", text(7, 3))
    for _ in range(2):
        traffic.step()
    assert [name for name, _, _ in traffic.step()] == ["first", "other"], "it lets others pass"
    assert traffic.rung("wait_for_prefix") == 1
    assert ("second", 20, 1) in traffic.step()
    traffic.run()
    assert traffic.finished("second").cached_tokens == 20


def test_waiting_for_a_prefix_is_bounded() -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(batched=8, waits=0))
    shared = text(5, 20)
    traffic.submit("first", [*shared, 1])
    traffic.submit("second", [*shared, 2])
    traffic.run()
    assert traffic.rung("wait_for_prefix") == 0
    assert traffic.finished("second").cached_tokens == 16, "what was there when it came"


@pytest.mark.parametrize("salt", ["", "theirs"])
def test_nobody_waits_for_a_prefix_of_another_root(salt: str) -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(batched=8))
    shared = text(5, 20)
    traffic.submit("first", [*shared, 1])
    traffic.submit("second", [*shared, 2], salt=salt)
    traffic.run()
    assert traffic.finished("second").cached_tokens == (0 if salt else 20)


def test_no_more_than_so_many_are_held_back() -> None:
    traffic = Traffic(make_layout(FULL, 80), limits(batched=8, seats=40))
    shared = text(5, 20)
    for n in range(MAX_HELD_BACK + 3):
        traffic.submit(f"q{n:02}", [*shared, n], max_tokens=1)
    traffic.submit("other", text(7, 3))
    for _ in range(3):
        traffic.step()
    assert traffic.rung("wait_for_prefix") == MAX_HELD_BACK
    assert "other" not in [r for p in traffic.plans for r in p.admitted]
    traffic.run()
    admitted = [r for p in traffic.plans for r in p.admitted]
    assert admitted == sorted(admitted, key=lambda name: (name == "other", name)), "still in order"


requests = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.integers(0, LAST_ARRIVAL)
    ),
    min_size=1,
    max_size=8,
)


@some()
@given(requests, st.sampled_from([3, 8, 32]), st.integers(1, 4), st.sampled_from([FULL, MIXED]))
def test_the_rules_of_a_step_hold_for_any_traffic(
    wanted: list[tuple[int, int, int, int]], batched: int, seats: int, windows: tuple[int, ...]
) -> None:
    traffic = Traffic(make_layout(windows, 26), limits(max(batched, seats), seats, 44))
    running: list[str] = []
    for now in itertools.count():
        for number, (seed, length, max_tokens, arrival) in enumerate(wanted):
            if arrival == now:
                traffic.submit(f"q{number}", text(seed, length), max_tokens)
        if traffic.core.has_work:
            plan = traffic.plan()
            running = [n for n in running if n not in plan.preempted] + list(plan.admitted)
            check_rules(plan, running, max(batched, seats), seats)
            ended = [e.request_id for e in traffic.finish_step(plan) if isinstance(e, Finished)]
            running = [n for n in running if n not in ended]
        elif now > LAST_ARRIVAL:
            break
    assert not running
    assert len([e for e in traffic.events if isinstance(e, Finished)]) == len(wanted)


def check_rules(plan: StepPlan, running: list[str], batched: int, seats: int) -> None:
    def place(work: TokenWork) -> tuple[int, int]:
        decodes = work.samples and work.count == 1 and work.output_index > 0
        kind = 2 if work.request_id in plan.admitted else 0 if decodes else 1
        return kind, running.index(work.request_id)

    places = [place(work) for work in plan.work]
    assert places == sorted(places), "decodes, prefills, admissions, each in order of admission"
    assert len({work.request_id for work in plan.work}) == len(plan.work)
    assert plan.num_tokens <= batched
    assert len(running) <= seats
    assert not (plan.preempted and plan.admitted)
    assert {w.handle for w in plan.work} >= set(plan.new_pages[:, 0].tolist())


def test_prompts_one_after_another_where_so_many_tokens_are_enough() -> None:
    chosen = replace(limits(batched=64), enough_prompt_tokens=8)
    traffic = Traffic(make_layout(MIXED, 60), chosen)
    traffic.submit("long", text(1, 30), max_tokens=3)
    traffic.submit("short", text(2, 5), max_tokens=3)
    traffic.submit("longer", text(3, 40), max_tokens=3)
    traffic.submit("last", text(4, 6), max_tokens=3)
    assert traffic.step() == [("long", 0, 30)], "whole, and nobody with it"
    assert traffic.step() == [("long", 30, 1), ("short", 0, 5), ("longer", 0, 3)]
    assert traffic.step() == [("long", 31, 1), ("short", 5, 1), ("longer", 3, 37)]
    traffic.run()
    by_prompt = Traffic(make_layout(MIXED, 60), limits(batched=64))
    by_prompt.submit("long", text(1, 30), max_tokens=3)
    by_prompt.submit("short", text(2, 5), max_tokens=3)
    assert len(by_prompt.step()) == 2, "else as many as the step may compute"


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = machine(weight=2.0)


PROMPT = [1, 2, 3, 4, 5]


def step(traffic: Traffic, *held: str) -> StepPlan:
    plan = traffic.core.plan(frozenset(map(RequestId, held)))
    traffic.finish_step(plan)
    return plan


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(pool_of(12, group(4, 1, 0)), limits())


def test_a_running_request_sits_out_and_goes_on(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    traffic.submit("b", [9, *PROMPT])
    traffic.step()
    assert works(step(traffic, "a")) == [("b", 6, 1)]
    assert works(step(traffic, "b")) == [("a", 5, 1)]
    traffic.run()
    assert len(traffic.tokens("a")) == len(traffic.tokens("b")) == 8


def test_a_waiting_request_is_passed_over(traffic: Traffic) -> None:
    held = [f"h{i}" for i in range(20)]  # more than may wait for a prefix
    for index, name in enumerate(held):
        traffic.submit(name, [index, 7, 8])
    traffic.submit("b", PROMPT)
    plan = step(traffic, *held)
    assert plan.admitted == ("b",)
    traffic.core.resume_held()
    traffic.run()


def test_a_core_whose_requests_are_held_rests_until_they_resume(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    traffic.step()
    assert step(traffic, "a").work == ()
    assert (traffic.core.has_work, traffic.core.has_requests) == (False, True)
    traffic.core.resume_held()
    traffic.run()
    assert len(traffic.tokens("a")) == 8
