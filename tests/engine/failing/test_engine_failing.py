"""Steps that raise and rows that are not numbers, over pages that can be read back."""

import dataclasses
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.clock import VirtualClock
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.failed_steps import LOG_SECONDS, MOST_IN_A_ROW, FailedSteps
from kvell.engine.failing.failures import TOO_COMPLEX, StepFailed, StepFailure
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import NO_TOKEN, StepPlan, StepResult, TokenWork
from kvell.engine.running.batching import GroupArrays
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import RequestQueue
from kvell.memory import create_core
from kvell.pages.audit import audit
from kvell.vocabulary import NOT_NUMBERS, RequestId, StepNumber
from tests.depth import few
from tests.engine.conftest import EOS, make_layout, make_submit
from tests.engine.traffic import limits
from tests.engine.virtual_model import VirtualModel, expected_output
from tests.front.seen import taken
from tests.journaled import JournaledCore
from tests.reports import facts

ONLY = "mixed-0"
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


class Failing(VirtualModel):
    """Raises for guilty requests, and at random, once the plan's copies are made."""

    guilty: frozenset[str] = frozenset()
    chance = random.Random(0)
    rate = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        fails = bool(plan.work) and self.chance.random() < self.rate
        self._at = self.chance.randrange(len(plan.work)) if fails else -1
        try:
            return super().run(plan)
        except ArithmeticError as failure:
            self._drafted.clear()
            self._before.fail(plan.step)
            self.broken |= {work.handle for work in plan.work}
            raise StepFailed("it failed") from failure

    def __init__(self, layout: object) -> None:
        super().__init__(layout)  # type: ignore[arg-type]
        self.broken: set[int] = set()

    def _compute(self, index: int, work: TokenWork, arrays: list[GroupArrays]) -> list[int]:
        if work.request_id in self.guilty or index == self._at:
            raise ArithmeticError("cannot compute this")
        if work.handle in self.broken:  # planned before its step failed: nobody's
            self._drafted.append(work)
            self._digests[work.handle] = [0] * (work.start + work.count + 1)
            return [0] * work.num_logits
        return super()._compute(index, work, arrays)


class Served:
    """A front's queue over one engine core, all in virtual time; every commit is audited."""

    def __init__(self, chosen: Limits) -> None:
        self.layout, self.chosen = make_layout((0, 9), 30), chosen
        self.journal = Journal()
        self.told = JournaledCore(self.fresh(), self.journal)
        self.model = Failing(self.layout)
        self.queue = RequestQueue(99)
        self.queue.line(ONLY).open(facts(64))
        self.entries: dict[str, LogEntry] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.failures = 0
        self.now = 0.0

    def fresh(self) -> EngineCore:
        core = create_core(self.layout)
        return EngineCore(core, self.chosen, frozenset({EOS}))

    def ask(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        ids = np.asarray(prompt, "<i4").tobytes()
        self.now += 1
        self.entries[name] = LogEntry(RequestSpec(RequestId(name), ids, params), self.now)
        self.queue.add(self.entries[name])

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.queue.on_event(ONLY, event, self.now)

    def step(self) -> None:
        for _, command in self.queue.due(self.now):
            self.take(self.told.tell(command))
        while self.told.core.may_plan:
            self.plans.append(self.told.plan())
            self.in_flight.append(self.plans[-1])
        plan = self.in_flight.popleft()
        try:
            result: StepResult | StepFailure = self.model.run(plan)
        except StepFailed:
            self.failures += 1
            result = StepFailure(plan.step, "a step failed")
        self.take(self.told.commit(result))
        assert audit(self.layout, self.told.core.memory.snapshot()) == []

    def run(self) -> dict[str, tuple[list[int], Finished]]:
        for _ in range(4000):
            if not (self.queue.waiting or self.queue.in_flight or self.told.core.has_work):
                break
            self.step()
        assert sum(self.told.core.memory.snapshot().used) == 0
        return {name: self.end(entry) for name, entry in self.entries.items()}

    def end(self, entry: LogEntry) -> tuple[list[int], Finished]:
        output = taken(entry)
        assert output.finished is not None, "it never ended"
        return list(output.token_ids), output.finished

    def check_replay(self) -> None:
        again = self.fresh()
        assert replay(self.journal.entries, again) == self.plans
        assert again.memory.snapshot() == self.told.core.memory.snapshot()


def at_depth(depth: int, batched: int = 16, seats: int = 8) -> Limits:
    return Limits(**{**vars(limits(batched=batched, seats=seats)), "depth": depth})


@pytest.mark.parametrize("depth", [0, 1])
def test_the_guilty_are_refused_and_innocents_go_on(depth: int) -> None:
    served = Served(at_depth(depth))
    innocent = {f"i{n}": ([*PROMPT, n], 30) for n in range(5)}
    for name, (prompt, count) in innocent.items():
        served.ask(name, prompt, count)
    for _ in range(12):
        served.step()
    guilty = [f"g{n}" for n in range(6)]
    served.model.guilty = frozenset(guilty)
    for name in guilty:
        served.ask(name, [*PROMPT, 40], 5)
    ends = served.run()
    for name, (prompt, count) in innocent.items():
        tokens, end = ends[name]
        assert (tokens, end.reason) == (expected_output(prompt, count), "length")
    for name in guilty:
        assert ends[name][0] == []
        assert ends[name][1].message.startswith("a step failed; it was the only suspect")
    assert max(ends[name][1].attempt for name in innocent) > 0
    served.check_replay()


@few()
@given(
    st.integers(0, 1),
    st.sampled_from([5, 16, 40]),
    st.integers(2, 8),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=9),
    st.sets(st.integers(0, 8)),
    st.integers(0, 1 << 30),
)
def test_steps_fail_at_random(
    depth: int,
    batched: int,
    seats: int,
    asked: list[tuple[int, int]],
    guilty: set[int],
    seed: int,
) -> None:
    """Whoever is answered is answered right, and who cannot be computed never is."""
    served = Served(at_depth(depth, max(batched, seats), seats))
    served.model.chance, served.model.rate = random.Random(seed), 0.1
    served.model.guilty = frozenset(f"q{n}" for n in guilty)
    prompts = {f"q{n}": [i * i % 40 for i in range(size)] for n, (size, _) in enumerate(asked)}
    for (name, prompt), (_, count) in zip(prompts.items(), asked, strict=True):
        served.ask(name, prompt, count)
    ends = served.run()
    for n, (name, prompt) in enumerate(prompts.items()):
        tokens, end = ends[name]
        assert tokens == expected_output(prompt, asked[n][1])[: len(tokens)]
        assert end.reason == ("length" if len(tokens) == asked[n][1] else "error")
        assert name not in served.model.guilty or not tokens
    served.check_replay()


def test_logits_that_are_no_numbers_end_a_request_and_leave_nothing() -> None:
    """Not even the pages of earlier chunks; what others have computed stays."""
    core = Served(limits(batched=8)).fresh()
    run_alone(core, make_submit("kept", [*range(20), 7], 2))
    kept = core.memory.peek(np.arange(30, dtype=np.int32), "")
    assert kept == 20
    prompt = [*range(20), *range(30, 42)]
    core.submit(make_submit("bad", prompt, 4))
    events: list[Event] = []
    while core.has_work:
        plan = core.plan()
        drawing = tuple(NOT_NUMBERS for work in plan.work if work.samples)
        events += core.commit(StepResult(plan.step, drawing))
    [ended] = events
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.output_tokens, ended.step_failed) == ("error", 0, "")
    assert "not numbers (NaN or infinite) at output position 0" in ended.message
    assert core.audit() == ()
    assert core.memory.peek(np.asarray([*prompt, 1], np.int32), "") <= kept
    assert core.memory.peek(np.arange(30, dtype=np.int32), "") == kept


def run_alone(core: EngineCore, command: object) -> None:
    core.submit(command)  # type: ignore[arg-type]
    while core.has_work:
        plan = core.plan()
        core.commit(StepResult(plan.step, tuple(1 for work in plan.work if work.samples)))


def test_a_request_may_fail_in_the_middle_of_its_answer_beside_others() -> None:
    core = Served(at_depth(1)).fresh()
    for name in "ab":
        core.submit(make_submit(name, PROMPT, 6))
    events: list[Event] = []
    waiting: deque[StepPlan] = deque()
    count = 0
    while core.has_work:
        while core.may_plan:
            waiting.append(core.plan())
        plan, count = waiting.popleft(), count + 1
        tokens = [
            NOT_NUMBERS if work.request_id == "a" and count >= 4 else 3
            for work in plan.work
            if work.samples
        ]
        events += core.commit(StepResult(plan.step, tuple(tokens)))
        assert core.audit() == ()
    ends = {one.request_id: one for one in events if isinstance(one, Finished)}
    assert ends[RequestId("a")].reason == "error"
    assert "position 3" in ends[RequestId("a")].message
    assert ends[RequestId("b")].reason == "length"
    told = [one for one in events if isinstance(one, Tokens) and one.request_id == "a"]
    assert [token for one in told for token in one.token_ids] == [3, 3, 3]


def test_a_grammar_that_is_stuck_says_so() -> None:
    core = Served(limits()).fresh()
    core.submit(make_submit("a", PROMPT, 6))
    [ended] = core.commit(StepResult(core.plan().step, (NO_TOKEN,)))
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.message, ended.bound) == ("error", TOO_COMPLEX, "grammar")


@pytest.mark.parametrize(
    ("lists", "field"),
    [
        ({"allowed_token_ids": (5,), "bad_words_token_ids": ((5,),)}, "allowed_token_ids"),
        ({"bad_words_token_ids": ((5,),)}, "bad_words"),
    ],
)
def test_lists_that_exclude_every_token_are_for_the_client_to_change(
    lists: dict[str, Any], field: str
) -> None:
    core = Served(limits()).fresh()
    submit = make_submit("a", PROMPT, 6)
    sampling = dataclasses.replace(submit.spec.sampling, **lists)
    core.submit(dataclasses.replace(submit, spec=structs.replace(submit.spec, sampling=sampling)))
    [ended] = core.commit(StepResult(core.plan().step, (NO_TOKEN,)))
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.field) == ("error", field)
    assert ended.message.startswith(f"{field}=…: no token may come next")


def failed(cause: BaseException) -> StepFailed:
    failure = StepFailed("it failed")
    failure.__cause__ = cause
    return failure


PLAN = StepPlan(StepNumber(3))


def test_a_process_that_is_broken_ends() -> None:
    steps = FailedSteps(VirtualClock())
    for cause in (MemoryError(), RuntimeError("CUDA error: device-side assert triggered")):
        with pytest.raises(type(cause)):
            steps.contain(PLAN, failed(cause))
    with pytest.raises(ValueError):
        steps.contain(StepPlan(StepNumber(3), streams=(1,)), failed(ValueError()))


def test_so_many_failures_in_a_row_end_it_too() -> None:
    steps, cause = FailedSteps(VirtualClock()), ValueError("secret")
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW):
            told = steps.contain(PLAN, failed(cause))
            assert told == StepFailure(StepNumber(3), "a step failed (ValueError)")
        steps.on_success()
    for _ in range(MOST_IN_A_ROW):
        steps.contain(PLAN, failed(cause))
    with pytest.raises(ValueError, match="secret"):
        steps.contain(PLAN, failed(cause))
    assert steps.last is cause


def test_one_traceback_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    steps = FailedSteps(clock)
    for _ in range(3):
        steps.contain(PLAN, failed(ValueError("first")))
    clock.advance(LOG_SECONDS)
    steps.contain(PLAN, failed(ValueError("later")))
    first, second = caplog.records
    assert first.exc_info is not None and "first" in str(first.exc_info[1])
    assert "2 others" in second.getMessage()
