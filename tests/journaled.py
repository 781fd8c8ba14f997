"""An engine core without a loop, whose inputs a test writes down."""

from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import (
    UNBOUNDED,
    Abandoned,
    CoreCommand,
    Entry,
    Journal,
    Outcome,
    PlanAsked,
    Warmed,
    give,
)
from kvell.engine.core.lateness import Lateness
from kvell.engine.failing.failures import StepFailure
from kvell.engine.protocol.messages import Event
from kvell.engine.requests.plan import StepPlan
from kvell.mempool.entries import PeerEntry


class JournaledCore:
    """An engine core that records each input before it acts on it."""

    def __init__(self, core: EngineCore, journal: Journal | None = None) -> None:
        self.core = core
        self.journal = journal

    def tell(self, entry: CoreCommand) -> list[Event]:
        self._note(entry)
        return give(entry, self.core)

    def on_entry(self, entry: PeerEntry) -> list[Event]:
        self._note(entry)
        return self.core.on_entry(entry)

    def warm(self, chunks: int) -> None:
        """Report to the core that the next ``chunks`` chunks have memory; 0: no more will."""
        self._note(Warmed(chunks))
        self.core.step_memory.warm(chunks)

    def note(self, late: Lateness) -> None:
        self._note(late)
        self.core.note(late)

    def plan(self, question: PlanAsked = UNBOUNDED) -> StepPlan:
        self._note(question)
        return self.core.plan(question.held, question.shared_prompt_tokens, question.undrafted)

    def abandon(self) -> None:
        self._note(Abandoned())
        self.core.abandon()

    def commit(self, result: Outcome) -> list[Event]:
        self._note(result)
        if isinstance(result, StepFailure):
            return self.core.fail(result)
        return self.core.commit(result)

    def _note(self, entry: Entry) -> None:
        if self.journal is not None:
            self.journal.entries.append(entry)
