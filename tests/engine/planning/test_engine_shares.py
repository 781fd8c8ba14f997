"""Tenants beside each other once they are let in: who gives way, and to whom."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.planning.whole_prompts import (
    check_whole_prompts,
    has_budget,
    least_end,
    require_whole_prompts,
    without_chunks,
)
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.request import Request
from kvell.errors import ChangeSomething
from kvell.memory import Layout, create_core
from kvell.vocabulary import RequestId
from tests.depth import some
from tests.engine.conftest import make_layout, make_submit
from tests.engine.seen import use_memory
from tests.engine.traffic import Traffic, Works, limits, text
from tests.engine.works import spec_of, with_spec

FULL = (0,)
PAGE = 4


def submit(
    traffic: Traffic, name: str, length: int, max_tokens: int, *, tenant: str, priority: int = 0
) -> None:
    prompt = text(len(traffic.prompts), length)
    traffic.prompts[name] = prompt
    command = make_submit(name, prompt, max_tokens)
    traffic.tell(with_spec(command, tenant=tenant, group=name, priority=priority))


def steps_until_let_in(traffic: Traffic, name: str, most: int = 200) -> int:
    for count in range(1, most + 1):
        plan = traffic.plan()
        traffic.finish_step(plan)
        if name in plan.admitted:
            return count
    raise AssertionError(f"{name} was not let in within {most} steps")


def running(traffic: Traffic) -> list[str]:
    return [str(one.request_id) for one in traffic.core.running]


def test_who_has_all_seats_gives_one_back() -> None:
    traffic = Traffic(make_layout(FULL, 200), limits(seats=4))
    for n in range(4):
        submit(traffic, f"a{n}", 4, 40, tenant="a")
    traffic.step()
    traffic.step()
    submit(traffic, "b", 4, 2, tenant="b")
    assert steps_until_let_in(traffic, "b") <= 2
    assert running(traffic) == ["a0", "a1", "a2", "b"], "the youngest of a's made way"
    assert steps_until_let_in(traffic, "a3") <= 3, "it comes back when b's has ended"
    traffic.run()
    assert traffic.finished("a3").preemptions == 1


def test_seats_come_to_be_alike_and_stay() -> None:
    traffic = Traffic(make_layout(FULL, 400), limits(seats=6))
    for n in range(9):
        submit(traffic, f"a{n}", 4, 40, tenant="a")
    traffic.step()
    traffic.step()
    for n in range(9):
        submit(traffic, f"b{n}", 4, 40, tenant="b")
    for _ in range(8):
        traffic.step()
    assert sorted(name[0] for name in running(traffic)) == [*"aaabbb"]
    assert traffic.rung("preempt") == 3
    traffic.step()
    assert traffic.rung("preempt") == 3


def test_who_has_all_memory_makes_room() -> None:
    """a's three answers grow to no more than the pages; b's would wait for the end of one."""
    traffic = Traffic(make_layout(FULL, 30), limits(seats=8))
    for n in range(3):
        submit(traffic, f"a{n}", 36, 4, tenant="a")
    traffic.step()
    while len(running(traffic)) < 3:
        traffic.step()
    submit(traffic, "b", 8, 3, tenant="b")
    assert steps_until_let_in(traffic, "b") <= 3
    traffic.run()


@pytest.mark.parametrize(
    ("tenant", "priority", "makes_way"),
    [("b", 0, True), ("b", 1, False), ("b", -1, True), ("a", 0, False), ("a", -1, False)],
)
def test_nobody_makes_way_for_its_own_or_for_less_urgent_ones(
    tenant: str, priority: int, makes_way: bool
) -> None:
    traffic = Traffic(make_layout(FULL, 200), limits(seats=2))
    for n in range(2):
        submit(traffic, f"a{n}", 4, 20, tenant="a")
    traffic.step()
    traffic.step()
    submit(traffic, "late", 4, 2, tenant=tenant, priority=priority)
    assert (steps_until_let_in(traffic, "late") <= 2) == makes_way


def test_who_has_only_begun_makes_its_start_worth_it_first_but_for_a_newcomer() -> None:
    traffic = Traffic(make_layout(FULL, 400), limits(seats=5, batched=64, max_len=64))
    for n in range(5):
        submit(traffic, f"a{n}", 40, 20, tenant="a")
    while len(running(traffic)) < 5:
        traffic.step()
    submit(traffic, "b0", 4, 40, tenant="b")
    submit(traffic, "b1", 4, 2, tenant="b")
    assert steps_until_let_in(traffic, "b0") <= 2
    steps_until_let_in(traffic, "b1")
    [_, later] = [name for plan in traffic.plans for name in plan.preempted]
    assert len(traffic.tokens(later)) >= 40 // 8


def test_a_newcomer_leaves_the_oldest_request_its_prompt() -> None:
    traffic = Traffic(make_layout(FULL, 400), limits(seats=1, batched=4, max_len=64))
    submit(traffic, "a", 40, 8, tenant="a")
    traffic.step()
    for n in range(20):
        submit(traffic, f"b{n}", 4, 1, tenant="b")
    while not traffic.tokens("a"):
        assert "a" in running(traffic)
        traffic.step()
    traffic.run()


def test_who_is_preempted_waits_in_its_own_tenants_line() -> None:
    """a thrashes in too little memory; b's short ones come in between all the time."""
    traffic = Traffic(make_layout(FULL, 24), limits(seats=8))
    for n in range(8):
        submit(traffic, f"a{n}", 4, 40, tenant="a")
    while not traffic.rung("preempt"):
        traffic.step()
    for n in range(5):
        submit(traffic, f"b{n}", 4, 2, tenant="b")
        assert steps_until_let_in(traffic, f"b{n}") <= 12
    traffic.run(4000)
    assert all(traffic.finished(f"b{n}").preemptions == 0 for n in range(5))


def test_output_counts_for_whose_turn_it_is() -> None:
    """Each of a's answers is ten times as long: b has its turns more often."""
    traffic = Traffic(make_layout(FULL, 200), limits(seats=1))
    for n in range(4):
        submit(traffic, f"a{n}", 4, 50, tenant="a")
    for n in range(20):
        submit(traffic, f"b{n}", 4, 5, tenant="b")
    traffic.run(2000)
    admitted = [name for plan in traffic.plans for name in plan.admitted]
    assert [name[0] for name in admitted[:14]].count("a") <= 3


@some()
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 24), st.integers(1, 30), st.integers(0, 9)
        ),
        min_size=2,
        max_size=12,
    ),
    st.integers(18, 60),
    st.integers(1, 5),
)
def test_every_mix_comes_to_its_end_with_the_right_answers(
    asked: list[tuple[str, int, int, int]], pages: int, seats: int
) -> None:
    traffic = Traffic(make_layout(FULL, pages), limits(seats=seats))
    for number, (tenant, length, max_tokens, steps) in enumerate(asked):
        submit(traffic, f"{tenant}{number}", length, max_tokens, tenant=tenant)
        for _ in range(steps):
            if traffic.core.has_work:
                traffic.step()
    traffic.run(4000)
    ends = [traffic.finished(str(RequestId(name))) for name in traffic.prompts]
    assert all(one.reason in ("stop", "length") for one in ends)


MIXED = (0, 9)
PLAIN = SamplingParams(temperature=0)
SCORED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)


def whole(layout: Layout, batched: int = 32, seats: int = 8) -> Traffic:
    return Traffic(layout, without_chunks(limits(batched, seats), layout))


def request(length: int, computed: int = 0, sampling: SamplingParams = PLAIN) -> Request:
    return Request(spec_of(range(length), sampling), 0, 8, "", computed=computed)


def test_prompts_go_first_and_decodes_wait() -> None:
    traffic = whole(make_layout(MIXED, 40))
    traffic.submit("a", text(1, 4))
    assert traffic.step() == [("a", 0, 4)]
    traffic.submit("b", text(2, 20))
    assert traffic.step() == [("b", 0, 20)]
    assert traffic.step() == [("a", 4, 1), ("b", 20, 1)]


def test_as_many_prompts_share_a_step_as_fit_whole_in_order_of_arrival() -> None:
    traffic = whole(make_layout(MIXED, 60))
    for name, length in (("a", 20), ("b", 12), ("c", 21), ("d", 20), ("e", 4)):
        traffic.submit(name, text(ord(name), length))
    assert traffic.step() == [("a", 0, 20), ("b", 0, 12)]
    assert traffic.step() == [("c", 0, 21)], "e would fit, but d is before it"
    assert traffic.step() == [("d", 0, 20), ("e", 0, 4)]
    assert [name for name, _, _ in traffic.step()] == ["a", "b", "c", "d", "e"]
    traffic.run()


def test_with_chunks_the_same_prompts_fill_every_step() -> None:
    traffic = Traffic(make_layout(MIXED, 60), limits(batched=32))
    for name, length in (("a", 20), ("b", 12), ("c", 21), ("d", 20)):
        traffic.submit(name, text(ord(name), length))
    traffic.step()
    assert traffic.step() == [("a", 20, 1), ("b", 12, 1), ("c", 0, 21), ("d", 0, 9)]


def test_a_prompt_that_came_too_late_for_a_step_is_in_the_next() -> None:
    """Memory does not change in between, so nothing but the budget was in its way."""
    traffic = whole(make_layout(MIXED, 60))
    traffic.submit("a", text(1, 30), max_tokens=20)
    traffic.submit("b", text(2, 30), max_tokens=20)
    assert [traffic.step() for _ in range(2)] == [[("a", 0, 30)], [("b", 0, 30)]]


def test_decodes_go_on_when_no_prompt_has_a_seat() -> None:
    traffic = whole(make_layout(MIXED, 60), seats=1)
    traffic.submit("a", text(1, 9), max_tokens=3)
    traffic.submit("b", text(2, 9), max_tokens=3)
    assert [traffic.step() for _ in range(4)] == [
        [("a", 0, 9)],
        [("a", 9, 1)],
        [("a", 10, 1)],
        [("b", 0, 9)],
    ]


def test_decodes_go_on_when_no_prompt_has_pages() -> None:
    traffic = whole(make_layout(FULL, 8))
    traffic.submit("a", text(1, 16), max_tokens=4)
    traffic.step()
    traffic.submit("b", text(2, 20), max_tokens=2)
    assert traffic.step() == [("a", 16, 1)]
    traffic.run()
    assert len(traffic.tokens("b")) == 2


def test_a_cached_prefix_counts_and_only_the_rest_takes_from_the_budget() -> None:
    traffic = whole(make_layout(FULL, 40))
    shared = text(1, 24)
    traffic.submit("first", shared, max_tokens=1)
    traffic.run()
    traffic.submit("a", [*shared, *text(2, 6)])
    traffic.submit("b", [*shared, *text(3, 6)])
    assert traffic.step() == [("a", 24, 6), ("b", 24, 6)]
    traffic.run()
    assert traffic.finished("b").cached_tokens == 24


def test_a_preempted_request_computes_what_it_lost_in_one_step() -> None:
    traffic = whole(make_layout(FULL, 8))
    traffic.submit("old", text(1, 8), max_tokens=16)
    traffic.submit("young", text(2, 9), max_tokens=15)
    traffic.run()
    (preempting,) = [plan for plan in traffic.plans if plan.preempted]
    back = next(p for p in traffic.plans if "young" in p.admitted and p.step > preempting.step)
    (work,) = back.work
    assert work.request_id == "young" and work.samples
    assert work.start + work.count > 9, "with its output so far"
    assert traffic.finished("young").preemptions == 1


def test_a_prompt_that_no_step_could_compute_is_refused() -> None:
    layout = make_layout(FULL, 40)
    traffic = whole(layout, batched=16)
    assert traffic.core.limits.max_model_len == 16
    traffic.submit("long", text(1, 16))
    assert traffic.finished("long").reason == "refused"
    assert "--max-model-len 16" in traffic.finished("long").message
    traffic.submit("short", text(1, 15))
    traffic.run()
    assert traffic.finished("short").reason == "length"


def test_a_whole_prompt_takes_pages_of_a_window_for_all_its_tokens() -> None:
    layout = make_layout((4, 4), 10)
    chunked, cut = limits(batched=64), without_chunks(limits(batched=64), layout)
    assert cut.max_model_len < chunked.max_model_len == 64
    traffic = whole(layout, batched=64)
    traffic.submit("a", text(1, cut.max_model_len - 1))
    assert traffic.step() == [("a", 0, cut.max_model_len - 1)]
    traffic.run()


class Short(StepMemory):
    """Memory for three more tokens of a request, while there is a shortage."""

    is_short = True

    def largest(self, handle: int, computed: int, wanted: int, tokens: int, rows: int) -> int:
        most = super().largest(handle, computed, wanted, tokens, rows)
        return min(most, computed + 3) if self.is_short else most


@pytest.mark.parametrize(("chunked", "first"), [(True, [("a", 0, 3)]), (False, [])])
def test_a_prompt_waits_for_memory_for_all_of_it(chunked: bool, first: Works) -> None:
    layout = make_layout(FULL, 40)
    traffic = Traffic(layout, limits()) if chunked else whole(layout)
    memory = Short(traffic.core.memory)
    use_memory(traffic.core, memory)
    traffic.submit("a", text(1, 20))
    assert traffic.step() == first
    memory.is_short = False
    computed = sum(count for _, _, count in first)
    assert traffic.step() == [("a", computed, 20 - computed)]
    traffic.run()


Arrivals = Sequence[tuple[int, int, int]]


def answered(layout: Layout, chosen: Limits, arrivals: Arrivals) -> Mapping[str, list[int]]:
    """Tokens of all requests: (step of arrival, prompt tokens, output tokens)."""
    traffic = Traffic(layout, chosen)
    for step in range(1 + max(arrival for arrival, _, _ in arrivals)):
        for number, (arrival, length, most) in enumerate(arrivals):
            if arrival == step:
                traffic.submit(f"q{number}", text(number % 3, length), most)
        traffic.step()
    traffic.run(1000)
    return {name: traffic.tokens(name) for name in traffic.prompts}


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 12)),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([FULL, MIXED, (9, 5)]),
    st.integers(16, 40),
    st.integers(1, 8),
)
@some()
def test_answers_are_those_of_chunked_prefill(
    arrivals: Arrivals, windows: Sequence[int], num_large: int, seats: int
) -> None:
    layout = make_layout(windows, num_large)
    cut = without_chunks(limits(44, seats), layout)
    chunked = replace(limits(11, seats), max_model_len=cut.max_model_len)
    assert answered(layout, cut, arrivals) == answered(layout, chunked, arrivals)


@pytest.mark.parametrize(
    ("computed", "budget", "chunked", "cut"),
    [(0, 20, True, True), (0, 19, True, False), (5, 15, True, True), (5, 0, False, False)],
)
def test_a_budget_is_enough_for_the_rest_of_a_prompt_or_for_none_of_it(
    computed: int, budget: int, chunked: bool, cut: bool
) -> None:
    one = request(20, computed)
    assert has_budget(one, budget, limits()) is chunked
    assert has_budget(one, budget, replace(limits(), enable_chunked_prefill=False)) is cut


def test_a_scored_prompt_needs_any_budget_at_all() -> None:
    cut = replace(limits(), enable_chunked_prefill=False)
    one = request(20, 5, SCORED)
    assert has_budget(one, 1, cut) and not has_budget(one, 0, cut)
    assert least_end(one, 15, cut) == 6


@given(st.integers(0, 19), st.integers(1, 20))
def test_a_step_may_end_anywhere_with_chunks_and_nowhere_but_at_the_end_without(
    computed: int, more: int
) -> None:
    wanted = min(20, computed + more)
    one = request(20, computed)
    assert least_end(one, wanted, limits()) == computed + 1
    assert least_end(one, wanted, replace(limits(), enable_chunked_prefill=False)) == wanted


def test_a_step_must_hold_the_longest_request() -> None:
    check_whole_prompts(100, 100)
    with pytest.raises(ChangeSomething, match="keeps prompts whole; use at least 101") as told:
        check_whole_prompts(100, 101)
    assert (told.value.field, told.value.value) == ("--max-num-batched-tokens", 100)


@pytest.mark.parametrize(
    ("change", "shares_pool", "parks", "problem"),
    [
        ({"max_model_len": 33}, False, False, "max_num_batched_tokens is below"),
        ({"min_chunk_tokens": 31}, False, False, "min_chunk_tokens is below"),
        ({}, True, False, "separate activations"),
        ({}, False, True, "no parked decodes"),
    ],
)
def test_what_could_put_a_whole_prompt_off_for_ever_is_refused(
    change: dict[str, int], shares_pool: bool, parks: bool, problem: str
) -> None:
    fine = Limits(32, 8, 32, min_chunk_tokens=32, enable_chunked_prefill=False)
    require_whole_prompts(fine, shares_pool=False, parks=False)
    wrong = replace(fine, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=problem):
        require_whole_prompts(wrong, shares_pool=shares_pool, parks=parks)
    chunked = replace(wrong, enable_chunked_prefill=True)
    require_whole_prompts(chunked, shares_pool=shares_pool, parks=parks)


def test_the_scheduler_checks_its_limits() -> None:
    wrong = Limits(32, 8, 33, min_chunk_tokens=33, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="no whole prompts"):
        Scheduler(create_core(make_layout()), wrong)
