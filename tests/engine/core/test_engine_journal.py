"""The journal is complete: replayed, it gives the same plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, PlanAsked, replay
from kvell.engine.protocol.messages import Cancel, Finished
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import create_core
from kvell.pages.audit import audit
from kvell.vocabulary import RequestId
from tests.depth import few
from tests.engine.conftest import EOS, make_layout, make_submit
from tests.engine.traffic import limits
from tests.engine.virtual_model import VirtualModel
from tests.journaled import JournaledCore

LAYOUT = make_layout((0, 9), 12)


def fresh() -> EngineCore:
    return EngineCore(
        create_core(LAYOUT),
        limits(batched=8, seats=4, max_len=36),
        frozenset({EOS}),
    )


class Recording:
    def __init__(self) -> None:
        self.journal = Journal()
        self.told = JournaledCore(fresh(), self.journal)
        self.model = VirtualModel(LAYOUT)
        self.plans: list[StepPlan] = []

    def submit(self, name: str, prompt: list[int], max_tokens: int = 6) -> None:
        self.told.tell(make_submit(name, prompt, max_tokens))

    def step(self, cancel: str = "") -> None:
        """Run a step, perhaps with a cancel while it is in flight."""
        if not self.told.core.has_work:
            return
        plan = self.told.plan()
        self.plans.append(plan)
        if cancel:
            self.told.tell(Cancel(RequestId(cancel)))
        self.told.commit(self.model.run(plan))

    def run(self) -> None:
        while self.told.core.has_work:
            self.step()


def busy() -> Recording:
    """Chunks, hits, a preemption, cancels before, between and in flight."""
    recording = Recording()
    shared = list(range(12))
    recording.submit("a", [*shared, 1], 15)
    recording.submit("b", [7, *shared, 2], 15)
    recording.submit("never", [3])
    recording.told.tell(Cancel(RequestId("never")))
    for _ in range(3):
        recording.step()
    recording.submit("c", [*shared, 3])
    recording.submit("refused", [99])
    recording.step(cancel="c")
    recording.submit("d", [*shared, 4])
    recording.step()
    recording.told.tell(Cancel(RequestId("d")))
    recording.run()
    return recording


def test_a_replay_gives_the_same_plans() -> None:
    recording = busy()
    assert any(p.preempted for p in recording.plans)
    assert replay(recording.journal.entries, fresh()) == recording.plans


def test_a_replay_ends_where_the_original_did() -> None:
    recording, again = busy(), fresh()
    replay(recording.journal.entries, again)
    assert again.stats() == recording.told.core.stats()
    assert again.memory.snapshot() == recording.told.core.memory.snapshot()


def test_a_cancel_left_out_is_noticed() -> None:
    """The comparison can fail: plans depend on the journal."""
    recording = busy()
    without = [e for e in recording.journal.entries if e != Cancel(RequestId("c"))]
    assert replay(without[: len(without) // 2], fresh()) != recording.plans


def test_entries_are_written_in_order_and_before_anything_is_done() -> None:
    recording = Recording()
    recording.submit("a", [1, 2, 3], 1)
    recording.step()
    submit, asked, result = recording.journal.entries
    assert submit == make_submit("a", [1, 2, 3], 1)
    assert asked == PlanAsked()
    assert isinstance(result, StepResult)
    with pytest.raises(ValueError, match="was not asked for"):
        recording.told.commit(result)
    assert recording.journal.entries[-1] is result, "what went wrong can be replayed too"


def test_without_a_journal_nothing_is_written_and_everything_works() -> None:
    told = JournaledCore(fresh())
    assert told.tell(make_submit("a", [1, 2, 3], 1)) == []
    events = told.commit(VirtualModel(LAYOUT).run(told.plan()))
    assert isinstance(events[-1], Finished)
    assert told.journal is None


def test_an_observer_looks_after_every_entry() -> None:
    entries = busy().journal.entries
    reports: list[list[str]] = []
    replay(entries, fresh(), lambda core: reports.append(audit(LAYOUT, core.memory.snapshot())))
    assert reports == [[]] * len(entries)


@few()
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(0, 5), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    )
)
def test_any_traffic_replays(script: list[tuple[int, int, int, int]]) -> None:
    recording = Recording()
    for number, (family, length, max_tokens, steps) in enumerate(script):
        recording.submit(f"q{number}", [family] * length, max_tokens + 1)
        for _ in range(steps):
            recording.step(cancel=f"q{number - 1}" if steps == 4 else "")
    recording.run()
    assert replay(recording.journal.entries, fresh()) == recording.plans
