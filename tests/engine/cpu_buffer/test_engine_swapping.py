"""Preempted requests resume where they were: exact, journaled, with nothing left behind."""

import pytest

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.protocol.messages import Cancel
from kvell.vocabulary import RequestId
from tests.depth import machine, search_until_all
from tests.engine.cpu_buffer.machines import SMALL, Run, SwappingMachine
from tests.engine.cpu_buffer.two_tiers import TwoTiers
from tests.engine.seen import saved_of
from tests.engine.swapping import AtRandom, swapping_core
from tests.engine.traffic import limits
from tests.engine.virtual_model import expected_output

PROMPTS = [[7 * n + i for i in range(11)] for n in range(4)]
PROMPTS = [[token % 50 for token in prompt] for prompt in PROMPTS]


def busy(
    num_large: int = 30,
    journal: Journal | None = None,
    seed: int | None = None,
) -> Run:
    """Four requests; the pool holds two at full length."""
    rule = None if seed is None else AtRandom(seed)
    core = swapping_core(SMALL, limits(batched=16, seats=4, max_len=40), num_large, rule)
    run = Run(core, journal)
    for number, prompt in enumerate(PROMPTS):
        run.submit(f"q{number}", prompt)
    return run


def check(run: Run) -> None:
    for number, prompt in enumerate(PROMPTS):
        assert run.outputs[f"q{number}"] == expected_output(prompt, 20)


def test_a_swapped_request_computes_no_token_twice() -> None:
    run = busy()
    run.to_the_end()
    check(run)
    rungs = run.core.stats().rungs
    assert rungs["swap_out"] == rungs["swap_in"] == rungs["preempt"] > 0
    once = sum(len(prompt) + 20 - 1 for prompt in PROMPTS)
    assert run.model.tokens_computed == once


def test_without_room_in_the_buffer_it_recomputes() -> None:
    run = busy(num_large=0)
    run.to_the_end()
    check(run)
    rungs = run.core.stats().rungs
    assert (rungs["swap_out"], rungs["buffer_full"]) == (0, rungs["preempt"])
    assert run.model.tokens_computed > sum(len(prompt) + 20 - 1 for prompt in PROMPTS)


def test_what_goes_out_is_what_the_next_token_needs_and_comes_back_once() -> None:
    run = busy()
    plan = run.until_swapped()
    (name,) = plan.preempted
    saved = saved_of(run.swapping)[name]
    at = saved.computed
    window_first = (at - 9) // 4
    assert sorted(saved.pages) == [
        *((0, position) for position in range(-(-at // 4))),
        *((1, position) for position in range(window_first, -(-at // 4))),
    ]
    while name not in (plan := run.step()).admitted:
        assert not len(plan.fetches)
    work = next(work for work in plan.work if work.request_id == name)
    assert (work.start, work.count) == (at, 1)
    fetched = {(group, held) for group, held, _ in plan.fetches.tolist()}
    assert fetched <= {(group, page) for (group, _), page in saved.pages.items()}
    assert not run.swapping.has(run.core.requests[name])


def test_a_page_of_the_buffer_is_not_given_again_in_the_step_that_reads_it() -> None:
    run = busy()
    plan = run.until_swapped()
    while not len(plan.fetches):
        plan = run.step()
    assert run.swapping.buffer.used_large > 0, "the step in flight may still read it"
    run.swapping.begin()
    assert run.swapping.buffer.used_large == 0


@pytest.mark.parametrize("moment", ["swapped", "fetched"])
def test_who_is_cancelled_leaves_the_buffer(moment: str) -> None:
    run = busy()
    plan = run.until_swapped()
    (name,) = plan.preempted
    if moment == "fetched":
        while name not in run.step().admitted:
            pass
    run.told.tell(Cancel(RequestId(name)))
    assert not saved_of(run.swapping)
    run.to_the_end()
    assert name not in run.ended or run.ended[name].reason == "cancelled"


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_journal_replays_to_the_same_offloads_and_fetches(seed: int | None) -> None:
    journal = Journal()
    run = busy(8, journal, seed)
    run.to_the_end()
    check(run)
    assert any(len(plan.offloads) for plan in run.plans)
    assert replay(journal.entries, again(8, seed)) == run.plans


def again(num_large: int, seed: int | None) -> EngineCore:
    rule = None if seed is None else AtRandom(seed)
    chosen = limits(batched=16, seats=4, max_len=40)
    return swapping_core(SMALL, chosen, num_large, rule)


def test_a_request_that_has_computed_nothing_of_its_own_is_not_swapped() -> None:
    run = busy()
    run.step()
    request = run.core.scheduler.seats.running[0]
    request.computed = run.core.memory.hit_tokens(request.handle)
    assert len(run.swapping.save(request)) == 0
    assert run.swapping.rungs["recompute"] == 1


TestSwappingMachine = SwappingMachine.TestCase
TestSwappingMachine.settings = machine(weight=0.3)


SORTS = "pool first", "buffer first", "by group", "state from the pool", "state from the buffer"

SOME = machine(40, weight=0.6)


@pytest.mark.hypothesis
def test_a_hit_is_the_longest_prefix_of_both_tiers() -> None:
    """A deep search goes on until every sort of hit across the tiers has happened."""
    TwoTiers.hits.clear()
    search_until_all(TwoTiers, SOME, lambda: [sort for sort in SORTS if not TwoTiers.hits[sort]])
