"""Prompts ahead of decodes: which give way and come back; answers stay the same."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.core.lateness import Lateness
from kvell.engine.protocol.messages import Cancel
from kvell.engine.requests.request import Request
from kvell.vocabulary import RequestId
from tests.depth import machine
from tests.engine.cpu_buffer.machines import (
    SMALL,
    ParkingMachine,
    Run,
    parking_of,
)
from tests.engine.swapping import swapping_core
from tests.engine.traffic import limits
from tests.engine.virtual_model import expected_output

PROMPTS = [[(7 * n + i) % 50 for i in range(16)] for n in range(6)]
TOKENS = 14


def core_of(ahead: int | None, num_large: int = 40) -> EngineCore:
    return swapping_core(SMALL, limits(batched=32, seats=6, max_len=40), num_large, ahead=ahead)


def started(ahead: int | None, num_large: int = 40, journal: Journal | None = None) -> Run:
    run = Run(core_of(ahead, num_large), journal)
    for number, prompt in enumerate(PROMPTS):
        run.submit(f"q{number}", prompt, TOKENS)
    return run


def first_tokens(run: Run) -> list[int]:
    """For each request, the step that brought its first token."""
    steps: dict[str, int] = {}
    while run.core.has_work:
        plan = run.step()
        for name in run.outputs:
            steps.setdefault(name, plan.step)
    return [steps[f"q{n}"] for n in range(len(PROMPTS))]


def test_first_tokens_come_sooner_and_answers_are_the_same() -> None:
    ahead, behind = started(40), started(None)
    soon, late = first_tokens(ahead), first_tokens(behind)
    assert max(soon) < max(late) / 2
    for number, prompt in enumerate(PROMPTS):
        assert ahead.outputs[f"q{number}"] == expected_output(prompt, TOKENS)
    assert parking_of(ahead.core).count > 0
    assert not parking_of(ahead.core).sizes.held


def test_no_token_is_computed_twice() -> None:
    run = started(40)
    run.to_the_end()
    once = sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS)
    assert run.model.tokens_computed == once


def test_who_was_admitted_last_and_decodes_gives_way() -> None:
    run = started(40)
    running: list[str] = []
    plan = run.step()
    while not plan.parked:
        running = [r.request_id for r in run.core.scheduler.seats.running if r.is_decoding]
        plan = run.step()
    assert list(plan.parked) == [*reversed(running)][: len(plan.parked)]
    assert plan.admitted
    assert not set(plan.parked) & {work.request_id for work in plan.work}


@pytest.mark.parametrize("decoding", [1, 2, 3])
def test_nobody_gives_way_for_a_prompt_that_the_step_has_no_tokens_for(decoding: int) -> None:
    """While decodes are parked, a step computes few prompt tokens, and it has some already."""
    few = limits(batched=32, seats=6, max_len=40)
    few = replace(few, enough_prompt_tokens=24, crowded_prompt_tokens=8)
    run = Run(swapping_core(SMALL, few, 40, ahead=40))
    for number in range(decoding):
        run.submit(f"q{number}", PROMPTS[number], TOKENS)
        run.step()
    for number in range(decoding, 6):
        run.submit(f"q{number}", PROMPTS[number][: 7 + 2 * number], TOKENS)
    parking = parking_of(run.core)
    crowds = 0
    while run.core.has_work:
        before = parking.count
        plan = run.step()
        prompt_tokens = sum(work.count for work in plan.work if work.count > 1)
        crowds += parking.count > before
        assert parking.count == before or prompt_tokens <= 8
    assert crowds > 0
    assert run.outputs["q0"] == expected_output(PROMPTS[0], TOKENS)


def test_the_logical_size_bounds_who_may_go() -> None:
    run = started(0)
    first_tokens(run)
    assert parking_of(run.core).count == 0


def test_lateness_moves_the_logical_size() -> None:
    core = core_of(1)
    sizes = parking_of(core).sizes
    for _ in range(3):
        core.note(Lateness(ttft_late=True, tpot_late=False))
    assert sizes.logical_chunks == 2
    for _ in range(3):
        core.note(Lateness(ttft_late=True, tpot_late=True))
    assert sizes.logical_chunks == 1
    core_without = swapping_core(SMALL, limits(), 4)
    core_without.note(Lateness(ttft_late=True, tpot_late=False))  # nobody asks


@pytest.mark.parametrize(("most_steps", "overtaken"), [(1, False), (1 << 30, True)])
def test_who_is_parked_for_long_is_not_overtaken(
    monkeypatch: pytest.MonkeyPatch, most_steps: int, overtaken: bool
) -> None:
    """Otherwise small prompts could take forever the pages that a large request waits for."""
    monkeypatch.setattr("kvell.engine.cpu_buffer.parking.MOST_STEPS_PARKED", most_steps)
    run = started(40)
    parking = parking_of(run.core)
    prompts_past: list[str] = []
    while run.core.has_work:
        before = {request.request_id for request in parking.parked}
        plan = run.step()
        if before & {request.request_id for request in parking.parked}:
            prompts_past += [name for name in plan.admitted if name not in before]
    assert parking.count > 0
    assert bool(prompts_past) is overtaken
    assert run.outputs["q0"] == expected_output(PROMPTS[0], TOKENS)


def test_a_full_buffer_parks_nobody() -> None:
    run = started(40, num_large=1)
    first_tokens(run)
    assert parking_of(run.core).count == 0


def test_who_is_cancelled_while_parked_leaves_nothing() -> None:
    run = started(40)
    while not (plan := run.step()).parked:
        pass
    waiting = run.core.counters.num_waiting
    run.told.tell(Cancel(RequestId(plan.parked[0])))
    assert run.core.counters.num_waiting == waiting - 1
    run.to_the_end()
    assert not parking_of(run.core).sizes.held


def test_a_journal_with_lateness_replays_to_equal_plans() -> None:
    journal = Journal()
    run = started(1, journal=journal)
    while run.core.has_work:
        run.step()
        run.told.note(Lateness(ttft_late=run.core.step % 5 != 0, tpot_late=run.core.step % 11 == 0))
    assert any(plan.parked for plan in run.plans)
    assert replay(journal.entries, core_of(1)) == run.plans


def test_who_made_way_in_vain_does_so_once_until_somebody_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise pages would go out and come back at every step."""
    run = Run(core_of(40))

    def too_few(
        _request: Request, running: Sequence[Request], admitted: Collection[RequestId]
    ) -> list[Request]:
        ready = [one for one in running if one.is_decoding and one.request_id not in admitted]
        return ready[-1:]

    monkeypatch.setattr(parking_of(run.core), "give_way", too_few)
    for number in range(4):
        run.submit(f"q{number}", PROMPTS[number][:6], 12)
    run.step()
    run.submit("long", [(3 * i) % 50 for i in range(36)], 2)
    while not run.ended:
        run.step()
    assert parking_of(run.core).count == 1
    run.to_the_end()
    assert run.outputs["long"] == expected_output([(3 * i) % 50 for i in range(36)], 2)


TestParkingMachine = ParkingMachine.TestCase
TestParkingMachine.settings = machine(weight=0.3)


def test_who_came_first_comes_back_first_and_is_parked_last() -> None:
    run = started(40)
    number = {f"q{n}": n for n in range(len(PROMPTS))}
    back: list[str] = []
    while run.core.has_work:
        plan = run.step()
        running = [request.number for request in run.core.scheduler.seats.running]
        parked = [request.number for request in parking_of(run.core).parked]
        assert running == sorted(running) and parked == sorted(parked)
        again = [name for name in plan.admitted if len(run.outputs.get(name, ())) > 1]
        if len(again) > 1:
            assert [number[name] for name in again] == sorted(number[name] for name in again)
        back += again
    assert back[0] == "q0"


def test_a_prompt_without_a_seat_goes_ahead_too() -> None:
    core = swapping_core(SMALL, limits(batched=32, seats=2, max_len=40), 200, ahead=200)
    run = Run(core)
    for number, prompt in enumerate(PROMPTS[:4]):
        run.submit(f"q{number}", prompt[:4], TOKENS)
    firsts: dict[str, int] = {}
    while run.core.has_work:
        plan = run.step()
        for name in run.outputs:
            firsts.setdefault(name, plan.step)
        assert len(run.core.scheduler.seats.running) <= 2
    assert max(firsts.values()) < TOKENS
    assert parking_of(core).count > 0


def test_who_is_preempted_is_parked_and_holds_no_prompt_up() -> None:
    run = started(40)
    while not (plan := run.step()).preempted:
        assert run.core.has_work, "nobody was preempted"
    assert set(plan.preempted) <= set(plan.parked)
    waiting = [request.request_id for request in run.core.scheduler.seats.waiting]
    assert not set(plan.preempted) & set(waiting)
    run.to_the_end()
    assert not parking_of(run.core).sizes.held


def test_a_size_that_shrank_brings_back_whom_it_holds_before_prompts() -> None:
    run = started(40)
    while not run.step().parked:
        pass
    parking = parking_of(run.core)
    parking.sizes.logical_chunks = 1
    while parking.parked:
        assert parking.comes_first
        before = {request.request_id for request in parking.parked}
        plan = run.step()
        assert set(plan.admitted) <= before
    run.to_the_end()


def test_prompts_that_were_parked_are_counted_once() -> None:
    run = started(40)
    run.to_the_end()
    assert parking_of(run.core).count > 0
    assert run.core.stats().prompt_tokens == sum(map(len, PROMPTS))


def test_a_refusal_says_what_would_have_been_enough() -> None:
    run = started(1)
    sizes = parking_of(run.core).sizes
    while sizes.logical_chunks == 1 and run.core.has_work:
        run.step()
        run.told.note(Lateness(ttft_late=True, tpot_late=False))
    assert sizes.logical_chunks > 2, "one step from nothing to a whole request"
