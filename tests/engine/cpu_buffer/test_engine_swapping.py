"""Preempted requests resume where they were: exact, journaled, with nothing left behind."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, JournaledCore, replay
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.protocol.messages import Cancel, Finished, Tokens
from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.requests.request import Request
from kvell.pages.audit import audit
from kvell.vocabulary import RequestId
from tests.depth import machine
from tests.engine.conftest import make_layout, make_submit
from tests.engine.planning.test_engine_machine import Configuration, EngineMachine
from tests.engine.swapping import AtRandom, swapping_core
from tests.engine.traffic import limits
from tests.engine.virtual_model import VirtualModel, expected_output

SMALL = make_layout((0, 9), 12)
PROMPTS = [[7 * n + i for i in range(11)] for n in range(4)]
PROMPTS = [[token % 50 for token in prompt] for prompt in PROMPTS]


class Run:
    """Requests over an engine core with a buffer; every step is audited."""

    def __init__(self, core: EngineCore, journal: Journal | None = None) -> None:
        self.core, self.plans = core, list[StepPlan]()
        self.told = JournaledCore(core, journal)
        self.model = VirtualModel(core.memory.layout)
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}

    @property
    def swapping(self) -> Swapping:
        swapping = self.core._scheduler.swapping
        assert swapping is not None
        return swapping

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 20) -> None:
        self.told.tell(make_submit(name, prompt, max_tokens))

    def step(self) -> StepPlan:
        plan = self.told.plan()
        self.plans.append(plan)
        for event in self.told.commit(self.model.run(plan)):
            if isinstance(event, Tokens):
                self.outputs.setdefault(event.request_id, []).extend(event.token_ids)
            elif isinstance(event, Finished):
                self.ended[event.request_id] = event
        assert audit(self.core.memory.layout, self.core.memory.snapshot()) == []
        assert self.swapping.buffer.audit() == []
        return plan

    def until_swapped(self) -> StepPlan:
        while True:
            plan = self.step()
            if len(plan.offloads):
                return plan

    def to_the_end(self) -> None:
        while self.core.has_work:
            self.step()
        assert not any(self.core.memory.snapshot().used)
        self.swapping.begin()
        assert self.swapping.buffer.used_large == 0


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
    saved = run.swapping._saved[name]
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
    assert not run.swapping.has(run.core._requests[name])


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
    assert not run.swapping._saved
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
    request = run.core._scheduler.running[0]
    request.computed = run.core.memory.hit_tokens(request.handle)
    assert len(run.swapping.save(request)) == 0
    assert run.swapping.rungs["recompute"] == 1


class Losing(Swapping):
    """A buffer that loses its content and refuses pages at random, from a seed."""

    seed = 0

    def resume(self, request: Request) -> None:
        if self._next_holder % 3 == 1:
            self.forget(request)
        super().resume(request)

    def save(self, request: Request, *, asks: bool = True) -> NewPages:
        if (request.computed + request.preemptions) % 4 == 3:
            return np.empty((0, 3), np.int32)
        return super().save(request, asks=asks)


class SwappingMachine(EngineMachine):
    """Random traffic with a small buffer that refuses and loses pages: the same answers."""

    configurations = (Configuration(), Configuration(depth=1))
    keeps_prefixes = False

    def fresh(self) -> EngineCore:
        some = self.layout.num_large_pages * 7 + self.limits.max_num_seqs
        make = Losing if some % 2 else Swapping
        return swapping_core(self.layout, self.limits, some % 31, AtRandom(some), make=make)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        swapping = self.engine.core._scheduler.swapping
        assert swapping is not None
        assert swapping.buffer.audit() == []
        given = {(g, page) for _, g, _, page in plan.new_pages.tolist()}
        targets = [(g, page) for g, _, page in plan.fetches.tolist()]
        assert len(set(targets)) == len(targets)
        assert given.issuperset(targets), "a fetch writes into a page that was not given with it"
        assert not {(c.group, c.target) for c in plan.copies}.intersection(targets)
        gave_way = plan.preempted or plan.parked or self.keeps_prefixes
        assert gave_way or not len(plan.offloads)


TestSwappingMachine = SwappingMachine.TestCase
TestSwappingMachine.settings = machine(weight=0.3)
