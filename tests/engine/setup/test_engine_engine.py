"""The engine ties core, runner and arena together, and gives back what it was granted."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from msgspec import structs

from kvell.device.chunks import ChunkDevice
from kvell.engine.core.index_watch import indexed_groups
from kvell.engine.core.journal import Journal, PlanAsked
from kvell.engine.protocol.messages import (
    CREDITS,
    SCHEMA_VERSION,
    AskStats,
    Cancel,
    Drain,
    Event,
    Finished,
    Ready,
    Tokens,
)
from kvell.engine.protocol.statistics import InstanceFacts, LoadStats, Stats
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import ModelRunner
from kvell.models.paged_model import PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId, StepNumber
from tests.device.fake_chunks import FakeChunks
from tests.engine.conftest import make_submit
from tests.engine.setup.small_engine import LAYOUT, Watched, make_engine
from tests.engine.virtual_model import expected_output


def committed(device: ChunkDevice) -> int:
    return int((device.home.table >= 0).sum())


def test_memory_comes_behind_the_pool_when_asked_and_once() -> None:
    device = FakeChunks(9, 64)
    engine, _ = make_engine(cold=device)
    engine.handle(make_submit("a", range(5)))
    engine.step()
    assert committed(device) == 0
    behind = engine.warm()
    assert behind is not None
    behind.finish()
    assert committed(device) == 9
    assert engine.warm() is behind


def test_an_engine_without_cold_memory_has_nothing_to_warm() -> None:
    engine, _ = make_engine()
    assert engine.warm() is None


def test_the_first_event_says_who_is_there() -> None:
    engine, _ = make_engine()
    told = engine.ready()
    parts = engine.contract.parts()
    facts = InstanceFacts(
        *(4, CREDITS, "virtual", 64, LAYOUT.pool_bytes, {}, parts, 96),
        indexed_groups(LAYOUT.groups),
        contract_lines=tuple(engine.contract.lines()),
    )
    assert told == Ready(SCHEMA_VERSION, facts)
    assert parts["contract_bytes"] == LAYOUT.pool_bytes + 10_000 + 64 * MIB


def test_a_pulse_counts_what_no_running_request_uses() -> None:
    engine, _ = make_engine()
    large, pool_bytes = LAYOUT.num_large_pages, LAYOUT.pool_bytes
    idle = LoadStats(0, 0, 0, large, large, pool_bytes, pool_bytes)
    assert engine.pulse() == idle
    engine.handle(make_submit("a", range(20), 3))
    head_bytes = engine.pulse().head_bytes
    assert 20 * LAYOUT.groups[0].token_bytes < head_bytes < 40 * LAYOUT.groups[0].token_bytes
    waiting = {"waiting": 1, "waiting_tokens": 20, "head_tokens": 20, "head_bytes": head_bytes}
    assert engine.pulse() == structs.replace(idle, answer_tokens=3, **waiting)
    engine.step()
    beat = engine.pulse()
    assert (beat.held_tokens, beat.waiting_tokens, beat.longest) == (20, 0, ())
    [stats] = engine.handle(AskStats())
    assert isinstance(stats, Stats)
    used_bytes = sum(group.used_pages * group.page_bytes for group in stats.groups)
    assert 0 < used_bytes == pool_bytes - beat.free_bytes
    assert (beat.step, beat.running, beat.waiting) == (1, 1, 0)
    assert beat.empty_large_pages == stats.empty_large_pages < large
    while engine.has_work():
        engine.step()
    assert engine.pulse().free_bytes == pool_bytes  # some of it is cached
    assert engine.pulse().empty_large_pages < large


def test_a_request_is_served_from_submission_to_its_end() -> None:
    engine, _ = make_engine()
    assert is_accepted(engine.handle(make_submit("a", [1, 2, 3], 4)))
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    tokens = [t for e in events if isinstance(e, Tokens) for t in e.token_ids]
    assert tokens == expected_output([1, 2, 3], 4)
    assert isinstance(events[-1], Finished)


def test_the_end_says_how_long_a_request_waited_prefilled_and_decoded() -> None:
    engine, runner = make_engine()
    engine.handle(make_submit("a", [1, 2, 3], 4))
    runner.clock.advance(0.5)
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.queue_seconds, end.prefill_seconds, end.decode_seconds) == (0.5, 1.0, 3.0)


def test_activations_are_granted_for_the_step_and_given_back() -> None:
    engine, runner = make_engine()
    engine.handle(make_submit("a", [1, 2, 3], 2))
    engine.step()
    engine.step()
    assert runner.granted == [100 + 3 * 10 + 50, 100 + 10 + 50]
    assert (engine.arena.granted_bytes, engine.arena.peak_bytes) == (0, 180)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_gives_its_activations_back_too(depth: int) -> None:
    engine, runner = make_engine(depth=depth)
    engine.handle(make_submit("a", [1, 2, 3], 2))
    runner.failure = MemoryError("the device is full")
    with pytest.raises(MemoryError, match="device is full"):
        engine.step()
    assert engine.arena.granted_bytes == 0


def test_a_step_beyond_the_reserve_is_a_bug_that_says_so() -> None:
    engine, runner = make_engine(reserve_bytes=179)
    engine.handle(make_submit("a", [1, 2, 3], 2))
    with pytest.raises(RuntimeError, match="step 1 needs 180 bytes"):
        engine.step()
    assert not runner.granted


def test_planned_ahead_a_request_is_served_from_submission_to_its_end() -> None:
    engine, runner = make_engine(depth=1)
    engine.handle(make_submit("a", [1, 2, 3], 4))
    events = engine.step()
    assert [e.token_ids for e in events if isinstance(e, Tokens)] == [
        tuple(expected_output([1, 2, 3], 1))
    ]
    assert engine.core.step == 2, "the second step was planned before the first one's result"
    while engine.has_work():
        events += engine.step()
    tokens = [t for e in events if isinstance(e, Tokens) for t in e.token_ids]
    assert tokens == expected_output([1, 2, 3], 4)
    assert isinstance(events[-1], Finished)
    assert runner.granted == [180, 160, 160, 160], "one step's activations at a time"
    assert engine.arena.granted_bytes == 0


def test_a_runner_prepares_a_step_while_the_one_before_runs() -> None:
    class Preparing(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.prepared: list[int] = []

        def prepare(
            self, plan: StepPlan, begun: Callable[[], None] | None = None
        ) -> Callable[[], StepResult]:
            self.prepared.append(plan.step)
            assert begun is not None
            return partial(self.run, plan)

    engine, _ = make_engine(depth=1)
    runner = engine.runner = Preparing()
    runner.engine = engine
    engine.handle(make_submit("a", [1, 2, 3], 4))
    engine.step()
    assert runner.prepared == [1, 2]
    while engine.has_work():
        engine.step()
    assert runner.prepared == [1, 2, 3, 4]


def test_stats_come_at_once_and_drain_is_left_to_the_gate() -> None:
    engine, _ = make_engine()
    (stats,) = engine.handle(AskStats())
    assert isinstance(stats, Stats)
    assert stats.large_pages == 40
    assert engine.handle(Drain()) == []
    assert not engine.has_work()


def test_a_cancel_ends_a_waiting_request_at_once() -> None:
    engine, _ = make_engine()
    engine.handle(make_submit("a", [1, 2, 3], 2))
    (event,) = engine.handle(Cancel(RequestId("a")))
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"


def test_everything_that_decides_goes_through_the_journal_and_questions_do_not() -> None:
    journal = Journal()
    engine, _ = make_engine(journal=journal)
    engine.handle(make_submit("a", [1, 2, 3], 1))
    engine.handle(AskStats())
    engine.step()
    submit, asked, result = journal.entries
    assert submit == make_submit("a", [1, 2, 3], 1)
    assert asked == PlanAsked(), "there are no tenants"
    assert isinstance(result, StepResult)


def test_a_model_runner_leaves_an_idle_plan_alone() -> None:
    """No work, no forward pass: there is no model behind this runner."""
    pool = torch.empty(0, dtype=torch.uint8)
    nothing = SimpleNamespace(device=pool.device, images=None)
    runner = ModelRunner(cast(PagedModel, nothing), LAYOUT, pool)
    assert runner.run(StepPlan(StepNumber(5))) == StepResult(StepNumber(5), ())
